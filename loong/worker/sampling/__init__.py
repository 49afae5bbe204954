"""From logits to tokens: logits processors, grammar constraints and random draws."""
