"""The commands that make corpora and read them."""
