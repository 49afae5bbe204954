"""Exchanges between devices of a host by puts and flags."""
