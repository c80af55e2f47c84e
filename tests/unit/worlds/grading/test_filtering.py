"""What of a rollout's changes may count."""

import pytest

from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.grading.filtering import CountedSources, filter_changes, matches


def wrote(path, data=b"x = 1\n", kind=ChangeKind.WRITTEN):
    return Change(path=path, kind=kind, data=data)


def outcome(*changes, **counted):
    filtered = filter_changes(changes, CountedSources(**counted))
    return [change.path for change in filtered.kept], {each.path: each.suspect for each in filtered.left_out}


@pytest.mark.parametrize(
    "path", ["calc.py", "src/pkg/calc.py", "src/pkg/json.py", "pkg/testing.py", "latest.py", "src/contest.py"]
)
def test_sources_count(path):
    assert outcome(wrote(path), roots=(".", "src")) == ([path], {})


@pytest.mark.parametrize(
    ("path", "suspect"),
    [
        ("sitecustomize.py", "runs before the tests"),
        ("src/usercustomize.py", "runs before the tests"),
        ("x.pth", "runs before the tests"),
        (".venv/lib/site-packages/a.pth", "runs before the tests"),
        ("conftest.py", ""),
        ("deep/conftest.py", ""),
        ("pytest.ini", ""),
        ("tox.ini", ""),
        ("setup.cfg", ""),
        ("pyproject.toml", ""),
        ("test_mine.py", ""),
        ("tests/util.py", ""),
        ("pkg/calc_test.py", ""),
        ("tests/test_calc.py", "changed a test"),
        ("pytest.py", "takes a module's place"),
        ("_pytest/runner.py", "takes a module's place"),
        ("src/unittest/__init__.py", "takes a module's place"),
        ("builtins.py", "takes a module's place"),
        ("evil-1.0.dist-info/entry_points.txt", "registers itself with the test runner"),
        ("pkg/__pycache__/calc.cpython-311.pyc", ""),
        ("calc.cpython-311.pyc", "brings compiled code"),
        ("fast.so", "brings compiled code"),
        (".git/config", ""),
        ("notes.md", ""),
        ("../calc.py", "reaches outside"),
        ("/etc/passwd.py", "reaches outside"),
        ("a/../calc.py", "reaches outside"),
        ("a\\calc.py", "reaches outside"),
        ("./calc.py", "reaches outside"),
        ("", "reaches outside"),
    ],
)
def test_everything_else_does_not(path, suspect):
    assert outcome(wrote(path), roots=(".", "src"), tests=("tests/test_calc.py",)) == ([], {path: suspect})


@pytest.mark.parametrize("root", ["src/", "./src", "src//", "src/../src", "./src/."])
def test_an_import_root_is_the_same_however_the_task_writes_it(root):
    assert outcome(wrote("src/pytest.py"), roots=(root,)) == ([], {"src/pytest.py": "takes a module's place"})


def test_a_hook_in_a_conftest_is_a_suspect_and_a_fixture_of_data_is_not():
    hook = b"def pytest_runtest_makereport(item, call): ...\n"
    assert outcome(wrote("conftest.py", hook))[1] == {"conftest.py": "hooks into the test runner"}
    assert outcome(wrote("conftest.py", b"import pytest\n@pytest.fixture\ndef path(): return 3\n"))[1] == {
        "conftest.py": ""
    }


def test_kinds_that_are_no_files():
    assert outcome(wrote("calc.py", b"/etc/passwd", ChangeKind.LINK))[1] == {"calc.py": "links to a place outside"}
    assert outcome(wrote("calc.py", b"other.py", ChangeKind.LINK))[1] == {"calc.py": ""}
    assert outcome(wrote("calc.py", b"", ChangeKind.OTHER))[1] == {"calc.py": ""}
    assert outcome(wrote("calc.py", b"", ChangeKind.DELETED)) == (["calc.py"], {})
    assert outcome(wrote("t.py", b"", ChangeKind.DELETED), tests=("t.py",)) == ([], {"t.py": "deleted a test"})


def test_a_name_that_no_sandbox_could_be_started_with_does_not_count():
    short, long, wide = (f"{'d/' * 50}{'x' * count}.py" for count in (800, 3950, 0))
    wide = wide.replace("d/", "é" * 10 + "/")
    kept, left_out = outcome(wrote(short), wrote(long), wrote(wide), sources=("**/*.py",))
    assert kept == [short]
    assert left_out == {long: "", wide: ""}


def test_bounds():
    assert outcome(wrote("a.py", b"x" * 9), file_bytes=8) == ([], {"a.py": ""})
    assert outcome(wrote("a.py", b"\0"))[0] == []
    several = [wrote(f"{letter}.py", b"xxxx") for letter in "cab"]
    assert outcome(*several, total_bytes=8) == (["a.py", "b.py"], {"c.py": ""})
    assert outcome(*several, files=1) == (["a.py"], {"b.py": "", "c.py": ""})


def test_a_path_that_the_task_names_counts_whatever_it_is_called():
    assert outcome(wrote("statistics.py"), sources=("statistics.py",)) == (["statistics.py"], {})
    assert outcome(wrote("test_mine.py"), sources=("test_mine.py",)) == (["test_mine.py"], {})
    assert outcome(wrote("test_mine.py"), sources=("test_mine.py",), tests=("test_mine.py",))[0] == []
    assert outcome(wrote("conftest.py"), sources=("conftest.py",))[0] == []


def test_the_last_change_of_a_path_is_looked_at():
    assert outcome(wrote("a.py"), wrote("a.py", b"\0"))[0] == []


@pytest.mark.parametrize(
    ("path", "glob", "found"),
    [
        ("a/b/c.py", "a/**/*.py", True),
        ("a/c.py", "a/**/*.py", True),
        ("a/b/c.py", "a/*.py", False),
        ("axpy", "a.py", False),
    ],
)
def test_globs(path, glob, found):
    assert matches(path, [glob]) is found
