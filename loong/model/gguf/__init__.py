"""Models in one GGUF file: its metadata (`header`), and the config, weights and tokenizer made from it."""
