"""The Tab example: lines that are easy, hard or impossible to finish, and a model that may stay silent."""
