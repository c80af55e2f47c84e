"""A model that says what next messages are, beside the rules."""
