"""A run over eleven hosts that share nothing but a network, and what a network does to them."""
