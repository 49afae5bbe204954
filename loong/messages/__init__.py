"""Messages between processes: their frames, their keys, and what comes from strangers."""
