"""The fabric over memory that the processes of a host share: arenas, copy streams and channels."""
