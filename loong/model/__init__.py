"""The decoder, its config and its weights."""
