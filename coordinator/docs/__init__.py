"""The OpenAPI document and the page made of it."""
