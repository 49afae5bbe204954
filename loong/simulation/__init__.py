"""Policies under load in virtual time. `points.run_point` simulates one run."""
