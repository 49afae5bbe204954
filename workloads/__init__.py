"""Workloads, the client that sends them, and what is measured and drawn from the answers."""
