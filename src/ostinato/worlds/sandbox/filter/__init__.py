"""Which system calls a program in a sandbox may make, and the kernel's filter that says so."""
