"""Requests for structured output, and the grammars they become."""
