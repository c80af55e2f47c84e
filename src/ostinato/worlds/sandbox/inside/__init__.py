"""Code of the sandbox's own processes, run by path and on the standard library alone.

The host imports from it the record format of `compare`, the clean-up of control groups (`groups`), and the paths in `view`.
"""
