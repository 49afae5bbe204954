"""Executors of plans: real workers, or a simulator driven by the cost model."""
