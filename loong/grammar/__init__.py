"""Tokens that a grammar allows next, such as one of a JSON schema."""
