"""Processes of one host: how they start and end, their logs, and what their memory and streams need."""
