"""Distributions of arrivals and lengths, and what is known of published traces."""
