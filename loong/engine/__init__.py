"""The loop from events to plans, and the protocol that clients of the engine speak."""
