"""Runs of a benchmark or a simulation: load, documents, tables, servers and the search for goodput."""
