"""Code that runs in an E2B sandbox as root of its virtual machine, with the standard library only and without the package around it."""
