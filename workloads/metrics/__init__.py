"""What is measured of requests: SLOs, attainment, backlog and results."""
