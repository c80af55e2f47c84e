"""A version before users: what the arms did side by side, how sure one may be of it at any moment, and what follows. Pure maths."""
