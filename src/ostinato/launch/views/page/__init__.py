"""Answers the page's questions from the log, the weight store and the workers' files."""
