"""What runs in the sandbox's own processes, by path and on the standard library alone. The host's side imports from it the format of
`compare`, the end of the control groups, and what `view` shows.
"""
