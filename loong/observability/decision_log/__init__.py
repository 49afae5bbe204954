"""What was decided, why, and how it turned out: a file of JSON lines, written beside the loop."""
