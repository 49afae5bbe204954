"""Answers that a JSON schema allows: which tokens may come next."""
