"""Starts things: command line and local processes."""
