"""`loong.LLM`: the engine in a Python program, without a server."""
