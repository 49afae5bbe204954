"""Attention of query blocks over pooled KV, and the merge of partials."""
