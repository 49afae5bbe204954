"""Batches of one step and of many, and their common parts: ends, slots and token placeholders."""
