"""The data plane: KV, queries, partials and control messages between instances."""
