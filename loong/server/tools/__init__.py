"""Function tools: their place in the prompt, the formats of calls, and their parsers."""
