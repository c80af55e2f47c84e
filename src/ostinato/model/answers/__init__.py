"""A model's answer -> text, reasoning and calls, by the format of its family."""
