"""Decodes on few instances that read KV where it was computed: the policies `esp-served` and `esp-served-N`."""
