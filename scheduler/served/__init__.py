"""`esp-served` and `esp-served-N`: decodes on few instances that read KV where it was computed."""
