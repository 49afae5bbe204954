"""The elastic policy `esp`, one module a stage."""
