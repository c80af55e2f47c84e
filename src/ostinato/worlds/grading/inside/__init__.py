"""Programs that run inside a grader's sandbox, on the standard library, and on pytest if the task has it. They never hold an expected
value.

A grader sends their source, with `encoding` prepended. Graders also import `encoding` to encode expected values.
"""
