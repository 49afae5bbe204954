"""Function tools: how a model is told of them, how its calls are written, and how they are read."""
