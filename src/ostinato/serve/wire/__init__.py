"""The HTTP layer: request/response exchanges, limits on their size, time and nesting, connection checks, and error responses."""
