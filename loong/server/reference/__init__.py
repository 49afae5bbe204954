"""The OpenAPI description and the API reference."""
