"""What carries plans out: real workers, or a simulator driven by the cost model."""
