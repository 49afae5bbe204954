"""Worker processes: KV pool, inputs, the forward pass, sampling."""
