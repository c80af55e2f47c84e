"""Code that runs inside a gVisor sandbox: standard library only, with modules that import each other by path."""
