"""Policies: pure functions from a snapshot of the cluster to a plan, and the cost model they use."""
