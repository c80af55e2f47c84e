"""The words of built tasks: the tests that say most come first, and code keeps its shape."""

from ostinato.worlds.building.filters import TaskKind, instruct
from ostinato.worlds.building.mutations import functions_of

SOURCE = '''
class Chart:
    @lru_cache
    def _cell_width(
        self,
        text: str,
    ) -> int:
        """Columns that a text takes."""
        wide = len(text)
        return wide

    @property
    def title(self):
        """What stands above it."""
        found = self.words[0]
        return found

    @functools.cached_property
    def footer(self):
        """What stands below it."""
        found = self.words[1]
        return found
'''
WIDTH, TITLE, FOOTER = functions_of("chart.py", SOURCE)
TESTS = [f"tests/t.py::test_draws_{n}" for n in range(9)] + ["tests/t.py::TestCells::test_cell_width[wide]"]


def test_tests_named_after_what_is_to_be_written_come_first():
    for kind in (TaskKind.REMOVAL, TaskKind.DELETION):
        words = instruct(kind, WIDTH, "charts", TESTS)
        listed = [line for line in words.splitlines() if line.startswith("- ")]
        assert listed == [f"- {TESTS[-1]}", *(f"- {test}" for test in TESTS[:7]), "- and 2 more"]


def test_where_a_bug_is_to_be_found_tests_keep_the_suites_order():
    assert "test_cell_width" not in instruct(TaskKind.BUG, WIDTH, "charts", TESTS)


def test_a_signature_over_several_lines_keeps_its_shape():
    words = instruct(TaskKind.DELETION, WIDTH, "charts", TESTS[:1])
    assert "    @lru_cache\n    def _cell_width(\n        self,\n        text: str,\n    ) -> int:\n\n" in words


def test_comments_and_colons_inside_a_signature_do_not_cut_it():
    header = """@deco(key=lambda x: {"#": x})
def draw(
    text,  # what is drawn: a line
    sizes: dict[str, int] = {"a": 1},
) -> "list[str]":"""
    (drawn,) = functions_of(
        "chart.py", f"{header}  # type: ignore\n    # drawn: below\n    found = text\n    return found\n"
    )
    assert drawn.signature == header


def test_a_property_is_called_one():
    for function in (TITLE, FOOTER):
        assert f"the property `{function.name}`" in instruct(TaskKind.REMOVAL, function, "charts", TESTS)
    assert "the method `Chart._cell_width`" in instruct(TaskKind.DELETION, WIDTH, "charts", TESTS)
