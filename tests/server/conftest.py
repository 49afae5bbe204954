from listening import serving_anywhere as serving
from listening import tokenizer

__all__ = ["serving", "tokenizer"]
