"""What the log says about every turn: a fold over its rows, in order."""
