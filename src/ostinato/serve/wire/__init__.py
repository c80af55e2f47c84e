"""HTTP itself: one exchange, its limits in bytes, time and nesting, who may connect, and errors in OpenAI's shape."""
