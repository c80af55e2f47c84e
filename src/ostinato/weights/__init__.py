"""The weight store: publishes, stores and follows versions of a model's weights, bit for bit."""
