"""The fabric by memory that the processes of a host share: arenas, copy streams and channels."""
