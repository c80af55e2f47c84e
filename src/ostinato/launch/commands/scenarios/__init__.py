"""What `ostinato demo` can show: one module per scenario."""
