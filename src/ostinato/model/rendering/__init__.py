"""Conversations -> the text that a model's chat template writes, in which nobody outside can forge a control token."""
