"""Distributions of arrivals and lengths, and published facts about traces."""
