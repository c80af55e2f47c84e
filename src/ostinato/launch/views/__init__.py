"""What people see of a run: observed, drawn, reported."""
