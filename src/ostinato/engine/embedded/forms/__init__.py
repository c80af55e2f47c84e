"""Forms of a model that answer with the same bits in fewer, larger calls, and how that is tried on the model itself."""
