"""What `ostinato worlds` does."""
