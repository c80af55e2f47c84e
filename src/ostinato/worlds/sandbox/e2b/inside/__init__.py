"""Code that runs as root in an E2B virtual machine, on the standard library alone and outside this package."""
