"""Sessions, what is expected of them, and when they have left it. Pure."""
