"""A model's answer -> text, reasoning and calls, as its family writes them."""
