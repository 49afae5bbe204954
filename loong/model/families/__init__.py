"""Families of models: a module for each, which alone knows the names and options of its files."""
