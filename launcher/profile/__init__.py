"""`loong profile`: measures real workers and fits the cost model to them."""
