"""The HTTP layer: bodies, errors, streams of events, listening and middleware."""
