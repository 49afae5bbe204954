"""API processes, whose engine is in another process, and the messages between both."""
