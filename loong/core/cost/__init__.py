"""The cost model as the core sees it, and the work that it prices."""
