"""Start and watch the workers."""
