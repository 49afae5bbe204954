"""An instance's KV pool and its free slots."""
