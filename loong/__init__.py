"""loong: elastic sequence-parallel LLM serving."""

__version__ = "0.1.0"
