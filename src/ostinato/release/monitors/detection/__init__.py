"""Sessions, the ranges expected of them, and the tests that they have left those. Pure."""
