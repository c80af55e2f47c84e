"""What is to be done in a world, and files of it."""
