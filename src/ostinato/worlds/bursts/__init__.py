"""Capacity planning: simulates how fast a burst of sandboxes starts on given machines."""
