"""`esp-served`: decodes on few instances that read KV where it was computed, or all beside prompts."""
