"""One forward pass: its inputs, its CUDA graphs and its exchanges."""
