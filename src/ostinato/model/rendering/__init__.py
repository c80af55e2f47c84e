"""Conversations -> the text that a model's chat template writes, in which text from outside cannot forge a control token."""
