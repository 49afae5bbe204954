"""The API of LightLLM's server, which LoongServe's server and benchmark client use as well."""
