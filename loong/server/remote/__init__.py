"""Processes that answer clients of an engine in another process, and what both say to each other."""
