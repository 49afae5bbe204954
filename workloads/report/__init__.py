"""The document of a run, its tables and its timeline."""
