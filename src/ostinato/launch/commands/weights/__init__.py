"""`ostinato weights`: what each of its commands does."""
