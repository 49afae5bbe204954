"""Baseline policies: fixed groups, disaggregation and replicas."""
