"""A trial on users: the arms' outcomes side by side, evidence that is valid at any moment, and the decisions. Pure maths."""
