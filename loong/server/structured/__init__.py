"""Structured output: fields of requests, and their grammars."""
