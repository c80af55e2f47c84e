"""A model that labels people's next messages, in addition to the rules."""
