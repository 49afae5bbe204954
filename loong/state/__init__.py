"""The state of the cluster: `ClusterState`, and what it keeps of requests, batches and KV."""
