"""`/dashboard`: one page that shows the cluster live, and what becomes of it on the way there."""
