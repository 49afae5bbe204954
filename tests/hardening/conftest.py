from listening import serving, tokenizer

__all__ = ["serving", "tokenizer"]
