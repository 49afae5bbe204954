"""Policies to compare with: fixed groups, disaggregation and replicas."""
