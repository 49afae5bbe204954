"""Values and pure functions of the cluster; standard library only."""
