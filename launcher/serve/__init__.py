"""`loong serve`: starts engine, workers and API processes, and watches them."""
