"""The decision log: decisions, their reasons and their results, as a file of JSON lines."""
