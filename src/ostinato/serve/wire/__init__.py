"""The HTTP layer: request/response exchanges, their limits on size, time and nesting, connection checks, and error responses."""
