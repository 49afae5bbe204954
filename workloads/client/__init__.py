"""The client that sends a workload over HTTP."""
