"""Facts about the machine and its GPUs: what fits their memory, and the cost model that belongs to them."""
