"""Programs that run inside a grader's sandbox: standard library, and pytest if the task has it. They never hold an expected value.

A grader sends their text. `encoding` is prepended to each of the others, and imported by graders that encode expected values.
"""
