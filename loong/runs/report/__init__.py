"""The report of runs: their pictures, tables and sentences on one page."""
