"""A run over thirteen hosts that share only a network, under network and host faults."""
