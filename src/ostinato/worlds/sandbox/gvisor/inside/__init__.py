"""Code that runs inside a gVisor sandbox, on the standard library alone. Its modules are top-level there and import each other by name."""
