"""Room for KV that instances lend each other: Infinite-LLM's protocol and DistKV-LLM's debts, as values."""
