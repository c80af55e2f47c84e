"""What each command of the terminal does."""
