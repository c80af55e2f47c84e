"""Views of a run for people: observed, drawn, reported."""
