"""The fabric by messages over sockets."""
