"""What is recorded and shown of a cluster: timeline, decision log, recordings and worker traces."""
