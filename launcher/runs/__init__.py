"""Runs of a benchmark or a simulation: load, documents, tables and the search for goodput."""
