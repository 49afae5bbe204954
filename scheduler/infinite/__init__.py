"""`infinite`: instances that plan alone and lend each other room for KV, as Infinite-LLM does."""
