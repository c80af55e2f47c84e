"""What is measured of people: declared metrics, what each makes of a turn, and turns of the log with what was said about them."""
