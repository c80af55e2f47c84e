"""The system calls that a program in a sandbox may make, and the kernel filter that enforces this."""
