"""From samples to micro-batches: admission, packing of tokens, and the experts that the tokens are sent through."""
