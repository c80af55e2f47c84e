"""Running code that a model wrote."""
