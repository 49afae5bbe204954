"""Events of the prefix cache for routers, in the form of vLLM."""
