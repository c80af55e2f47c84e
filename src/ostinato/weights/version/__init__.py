"""The format of a version: tensors hashed by chunk, manifests, the chain of deltas, signatures."""
