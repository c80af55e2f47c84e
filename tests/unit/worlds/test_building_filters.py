import pytest
from tests.fakes.tiny_package import MODULE

from ostinato.core.errors import BadRequest
from ostinato.worlds.building.filters import (
    ChangeFate,
    DuplicateCode,
    TaskKind,
    TestLines,
    instruct,
    is_specified,
    judge_run,
    reveals_answer,
    split_tests,
)
from ostinato.worlds.building.mutations import functions_of
from ostinato.worlds.building.runs import SuiteRun, judge_runs

CLAMP = functions_of("tiny_counts.py", MODULE)[0]


def run(passed="", failed="", **more):
    return SuiteRun(ended=dict.fromkeys(passed, "passed") | dict.fromkeys(failed, "failed"), **{"code": 0, **more})


@pytest.mark.parametrize(
    ("outcome", "lazy", "fate"),
    [
        (run("abc", "d"), {"d"}, ChangeFate.VALID),
        (run("abc", "d"), {"x"}, ChangeFate.TRIVIAL),
        (run("abc", "d"), None, ChangeFate.VALID),
        (run("", "ab"), {"a"}, ChangeFate.TOO_PLAIN),
        (run("abcd"), {"d"}, ChangeFate.UNNOTICED),
        (run("ab", "cd"), {"d"}, ChangeFate.VALID),  # 2 of 4: the share is allowed
        (run("a", "bcd"), {"d"}, ChangeFate.TOO_PLAIN),
        (run("a", code=None, stopped=True), {"d"}, ChangeFate.TOO_PLAIN),
        (run("a", code=None, hung=True), {"d"}, ChangeFate.ENDLESS),
        (run("a", code=None, signal=11), {"d"}, ChangeFate.CRASHES),
        (None, {"d"}, ChangeFate.CRASHES),
    ],
)
def test_what_one_run_says(outcome, lazy, fate):
    split = split_tests("abcd", outcome or SuiteRun())
    assert judge_run(outcome, split, stable=4, most_failing=0.5, lazy=None if lazy is None else frozenset(lazy)) is fate


def test_a_test_that_cannot_be_collected_any_more_fails():
    assert split_tests(["a", "b"], run("a")).fail_to_pass == ("b",)


def test_a_copy_of_the_answer_is_found_and_the_function_itself_is_none():
    files = {"tiny_counts.py": MODULE.encode()}
    assert not DuplicateCode(files).leaks(CLAMP, MODULE)
    assert DuplicateCode({**files, "docs/how.rst": MODULE.encode()}).leaks(CLAMP, MODULE)


TWINS = """
class Parser:
    def force_list(self, path, key):
        if self.lists is None:
            return False
        # whoever is asked
        return key in self.lists or path[-1] == "list"

    def force_text(self, way, name):
        if self.texts is None:
            return False
        return name in self.texts or way[-1] == "text"

    def other(self, way, name):
        if self.texts is None:
            return False
        return way in self.texts or way[-1] == "text"
"""


def test_a_twin_under_other_names_gives_the_answer_away():
    first, second, other = functions_of("p.py", TWINS)
    elsewhere = DuplicateCode({"p.py": TWINS.encode()})
    assert elsewhere.leaks(first, TWINS)
    assert elsewhere.leaks(second, TWINS)
    assert not elsewhere.leaks(other, TWINS)


@pytest.mark.parametrize("kind", list(TaskKind))
def test_the_words_say_what_and_name_tests_and_give_no_line_away(kind):
    words = instruct(kind, CLAMP, "tiny-counts", [f"tests/t.py::test_{n}" for n in range(10)])
    assert "tests/t.py::test_0" in words
    assert "and 2 more" in words
    assert "both allowed" in words  # the docstring's
    assert not reveals_answer(CLAMP, MODULE, words)
    assert reveals_answer(CLAMP, MODULE, words + '\n        raise ValueError("bounds")')
    assert (CLAMP.name in words) is (kind is not TaskKind.BUG)  # a bug is to be found


def test_a_green_suite_keeps_what_passes_each_time():
    tests = [f"t{n}" for n in range(40)]
    shaky = run(tests[1:], tests[:1])
    assert judge_runs([run(tests), shaky, run(tests)]) == (tuple(tests[1:]), 1, 0)


@pytest.mark.parametrize(
    "runs",
    [
        [run(["a"])],  # too few
        [run([f"t{n}" for n in range(30)], [f"u{n}" for n in range(5)])],  # fails
        [run([f"t{n}" for n in range(30)]), run([f"t{n}" for n in range(12)])],  # half of it is not sure
        [run([f"t{n}" for n in range(12)], uncollected={"broken.py": "ImportError: no", "b.py": "x"})],
    ],
)
def test_a_suite_that_is_not_green_is_refused(runs):
    with pytest.raises(BadRequest, match="not green"):
        judge_runs(runs)


def test_a_change_with_which_no_test_passes_is_left_out():
    outcome = run("", "ab")
    assert judge_run(outcome, split_tests("ab", outcome), stable=9, most_failing=0.5, lazy=None) is ChangeFate.UNGUARDED


SPARSE = '''
def undocumented(sig):
    first = sig[0]
    second = sig[1]
    return first + second

def of_types(sig: list[int], by: int = 2, *, then=None) -> None:
    first = sig[0]
    second = sig[1]
    return first + second

def of_one_type(sig: list[int]) -> None:
    first = sig[0]
    second = sig[1]
    return first + second

def two(sig):
    """Do it."""
    first = sig[0]
    second = sig[1]
    return first + second

def three(sig):
    """Add the two."""
    first = sig[0]
    second = sig[1]
    return first + second

class C:
    def __eq__(self, other):
        first = self[0]
        second = other[0]
        return first == second

    def __call__(self, other):
        first = self[0]
        second = other[0]
        return first == second
'''


def enough(function, *, kind=TaskKind.REMOVAL, tests=(), lines_a_word=4.0, undocumented_lines=8):
    return is_specified(kind, function, tests, lines_a_word=lines_a_word, undocumented_lines=undocumented_lines)


def test_what_is_to_be_written_says_what_for():
    undocumented, of_types, of_one_type, two, three, eq, call = functions_of("s.py", SPARSE)
    assert (of_types.types, of_one_type.types) == (2, 1)
    for function, says in (
        (undocumented, False),
        (of_types, True),
        (of_one_type, False),
        (two, False),
        (three, True),
        (eq, True),
        (call, False),
    ):
        assert enough(function) is says, function.name
    called = "def test_a():\n    assert undocumented((1, 2)) == 3\n"
    assert enough(undocumented, tests=[called])
    assert not enough(two, tests=[called])
    assert not enough(undocumented, tests=["def test_undocumented_things():\n    assert undocumented_too()\n"])
    for function in (undocumented, of_types, eq):  # a long body is not guessed from a call
        assert not enough(function, tests=[called], undocumented_lines=2)
    assert not enough(three, lines_a_word=0.9, undocumented_lines=0)  # three words for three lines are too few then


def test_of_a_long_docstring_a_deleted_function_keeps_the_first_paragraph():
    text = SPARSE.replace('"""Add the two."""', '"""Add it.\n\n    ' + "Both numbers. " * 100 + '"""')
    three = functions_of("s.py", text)[4]
    assert enough(three, kind=TaskKind.REMOVAL)
    assert not enough(three, kind=TaskKind.DELETION)
    assert "Both numbers" not in instruct(TaskKind.DELETION, three, "s", ["t.py::a"])


def test_the_lines_of_a_test_are_found_by_its_id():
    in_class = "class TestA:\n    @mark(s.undocumented)\n    def test_b(self, x):\n        assert x\n\n"
    tests = in_class + "def test_c():\n    assert 1\n"
    lines = TestLines({"t.py": tests.encode()})
    assert "s.undocumented" in lines.of("t.py::TestA::test_b[1::2]")
    assert lines.of("t.py::test_c").startswith("def test_c")
    assert lines.of("t.py::TestB::test_b") == lines.of("gone.py::test_b") == ""
