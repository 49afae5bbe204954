"""`/dashboard`: one page that shows the cluster live, and the data for it."""
