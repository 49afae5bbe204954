"""Records and views of a cluster: timeline, decision log, recordings and worker traces."""
