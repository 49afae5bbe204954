"""The HTTP layer: bodies, errors, event streams, listening and middleware."""
