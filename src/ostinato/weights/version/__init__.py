"""A version: tensors hashed by chunks, manifests, the chain of deltas, signatures."""
