"""Grammars of answers, such as JSON schemas: they decide which tokens may come next."""
