"""`esp-served`: decodes on few instances that read KV where it was computed, or on all with prompts."""
