"""Formats of weights with fewer bits than activations: their configs, their meaning, and their tensors."""
