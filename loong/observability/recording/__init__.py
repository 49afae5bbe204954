"""Recordings of all events and plans, for replay and comparison."""
