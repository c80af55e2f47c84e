"""The weight store: publishes, stores and follows versions of weights, bit for bit."""
