"""`lamina`: prompts and products on full instances, KV of decodes on memory instances, as Lamina does."""
