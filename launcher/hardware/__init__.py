"""Facts about the machine, and the cost model that belongs to it."""
