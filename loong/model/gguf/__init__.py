"""Models of one GGUF file: its metadata (`header`), and what config, weights and tokenizer are made of it."""
