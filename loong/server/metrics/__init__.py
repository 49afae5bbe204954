"""Metrics, request traces and spans."""
