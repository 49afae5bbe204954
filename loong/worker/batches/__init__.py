"""Batches of one step and of many, and what they share: ends, slots and token placeholders."""
