"""What several policies use: the planning view, striping, leases, forecasts and the batching program."""
