"""Attention over KV that is spread over instances."""
