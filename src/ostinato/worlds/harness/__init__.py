"""Harnesses: programs that let a model work on a task. Production, training and evaluation use the same ones."""
