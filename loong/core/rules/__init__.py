"""The rules of the cluster, one function a rule."""
