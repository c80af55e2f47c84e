"""Programs that run inside of a grader's sandbox: standard library, and pytest where the task has it. They never hold an expectation.

A grader sends their text. `encoding` is put before each of the others, and is imported by who encodes what is expected.
"""
