"""From logits to tokens: processors, constraints and random draws."""
