"""Data plane: the verbs by which KV, queries, partials and control move between instances."""
