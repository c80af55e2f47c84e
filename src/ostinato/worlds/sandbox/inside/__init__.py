"""What runs in the sandbox's own processes, by path and on the standard library alone. The host reads the formats that
`compare` and `groups` share with it.
"""
