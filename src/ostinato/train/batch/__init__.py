"""From samples to micro-batches: who is admitted, how their tokens are packed, and which experts they are sent through."""
