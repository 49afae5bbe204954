"""Workloads, the client that sends them, and metrics, plots and reports of the answers."""
