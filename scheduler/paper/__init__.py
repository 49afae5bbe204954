"""`esp-paper`: the four steps of LoongServe as published."""
