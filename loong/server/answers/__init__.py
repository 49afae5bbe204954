"""The answers of the API: structs that are encoded as they are, and that describe themselves in OpenAPI."""
