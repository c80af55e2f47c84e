"""A unified diff makes of files what git and difflib mean by it, or is refused."""

import difflib
import random

import pytest

from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import ChangeKind
from ostinato.worlds.unified_diff import patched

GIT = """diff --git a/calc.py b/calc.py
index 1..2 100644
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@ def add
 def add(a, b):
-    return a - b
+    return a + b
diff --git a/new.py b/new.py
new file mode 100644
--- /dev/null
+++ b/new.py
@@ -0,0 +1 @@
+x = 1
\\ No newline at end of file
--- a/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""
FILES = {"calc.py": b"def add(a, b):\n    return a - b\n", "old.py": b"gone\n"}


def test_a_diff_of_git_changes_makes_and_deletes():
    found = {change.path: change for change in patched(GIT, FILES.get)}
    assert found["calc.py"].data == b"def add(a, b):\n    return a + b\n"
    assert found["new.py"].data == b"x = 1"
    assert found["old.py"].kind is ChangeKind.DELETED
    assert list(found) == ["calc.py", "new.py", "old.py"]


@pytest.mark.parametrize("seed", range(200))
def test_it_is_the_inverse_of_taking_the_difference(seed):
    chance = random.Random(seed)

    def text() -> str:
        lines = [chance.choice(["a", "b", "--- c", "+++ d", "@@ -1 +1 @@", ""]) for _ in range(chance.randrange(1, 12))]
        return "\n".join(lines) + "\n" * chance.randrange(2)

    old, new = text(), text()
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), "f", "f", n=1)
    diff = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    if old != new:
        (change,) = patched(diff, {"f": old.encode()}.get)
        assert change.data.decode() == new


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ("nothing", "no unified diff"),
        (GIT.replace("a - b", "a * b"), "calc.py, line 2: the diff does not apply"),
        (GIT.replace("calc.py", "else.py"), "else.py: the diff changes this file"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-gone\n+a\n", "it renames a file"),
        ("--- old.py\n+++ old.py\n@@ -1 +1 @@\n*gone\n", "is not a valid line of a hunk"),
        ("--- old.py\n+++ old.py\n@@ -1 +1 @@\n-gone\n+a\n@@ -1 +1 @@\n-gone\n+b\n", "overlap"),
        ("--- old.py\n+++ old.py\n@@ -1,3 +1 @@\n-gone\n", "does not apply"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_place(diff, said):
    with pytest.raises(BadRequest, match=said):
        patched(diff, FILES.get)
