"""Conversion of text to tokens and back."""
