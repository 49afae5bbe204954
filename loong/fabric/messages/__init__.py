"""The fabric over sockets."""
