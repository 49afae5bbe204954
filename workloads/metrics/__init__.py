"""Measurements of requests: SLOs, attainment, backlog and results."""
