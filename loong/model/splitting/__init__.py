"""Cuts a model of Hugging Face at its attention, for devices that only hold KV and attend (Lamina, 5.3)."""
