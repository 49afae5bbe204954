"""The common parts of policies: the planning view, striping, leases, forecasts and the batching program."""
