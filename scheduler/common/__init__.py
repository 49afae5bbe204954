"""The common parts of policies: the planning view, striping, leases, room and forecasts."""
