"""The state of the cluster: `ClusterState`, and its records of requests, batches and KV."""
