"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "client/README.md",
    "client/js/README.md",
    "benchmarks/README.md",
    "examples/README.md",
    "tests/examinations/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
README_LINES, README_WORDS, README_WIDTH = 90, 900, 200  # what is read in five minutes
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
TROUBLE = ["it-does-not-learn.md", "it-does-not-ship.md", "it-is-slow.md", "words.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose(document))
    own = [(document.parent / link if link else document, part) for link, part in links if "://" not in link]
    assert [target for target, _ in own if not target.exists()] == []
    assert [(target, part) for target, part in own if part and part not in headings(target)] == []


def prose(document: Path) -> str:
    """Without blocks of code, whose comments look like headings."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(document: Path) -> set[str]:
    """What a link can name within a document, as GitHub makes it of its headings."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_read_in_five_minutes():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert len(text.split()) <= README_WORDS
    assert [line for line in text.splitlines() if len(line) > README_WIDTH] == []


@pytest.mark.parametrize("row", re.findall(r"^\| (?!Promise|-)(.+) \|$", GUARANTEES, re.MULTILINE))
def test_every_guarantee_names_its_proof(row):
    promise, proof = row.split(" | ")
    assert promise
    assert re.search(r"\]\(\.\./tests/[^)]+\.py\)", proof), "a guarantee without a test is a hope"


def test_the_readme_promises_nothing_that_the_guarantees_lack():
    section = (ROOT / "README.md").read_text().partition("## The strongest guarantees")[2].partition("\n## ")[0]
    named = re.findall(r"\]\((tests/[^)]+)\)", section)
    assert len(named) == 5
    assert [test for test in named if f"](../{test})" not in GUARANTEES] == []


@pytest.mark.parametrize("page", TROUBLE)
def test_a_page_for_people_in_trouble_is_short_and_in_the_guides_list(page):
    guide = ROOT / "docs" / "guide"
    assert len((guide / page).read_text().splitlines()) <= 120
    assert f"]({page})" in (guide / "README.md").read_text()


def said(source: Path) -> str:
    """The texts of all string literals below a folder; the parts of a formatted string are separate texts."""
    trees = (ast.parse(path.read_text()) for path in source.rglob("*.py"))
    found = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(text for text in found if isinstance(text, str))


def test_the_symptoms_are_quoted_as_the_program_words_them():
    """Three words in a row of each quoted message stand in a string of the source; shorter quotes are keys and values."""
    guide, words = ROOT / "docs" / "guide", said(ROOT / "src" / "ostinato")
    rows = [line for page in TROUBLE for line in (guide / page).read_text().splitlines() if line.startswith("|")]
    quoted = [first or second for row in rows for first, second in re.findall(r"``(.+?)``|`([^`]+)`", row)]
    told = [quote for quote in quoted if not re.match(r"ostinato |[a-z_.]+ = ", quote)]
    messages = [quote.split() for quote in told if len(quote.split()) >= 6]
    assert len(messages) > 30
    runs = {" ".join(each): [" ".join(each[at : at + 3]) for at in range(len(each) - 2)] for each in messages}
    assert [message for message, three in runs.items() if not any(run in words for run in three)] == []


def test_the_readmes_commands_are_the_makefiles():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/guarantees.md", "docs/guide/first-run.md")]
    named = set(re.findall(r"(?:^|`|: )make ([a-z-]+)", "\n".join(pages), re.MULTILINE))
    assert named <= targets, named - targets
    assert {"demo", "test", "examine", "demo-worlds"} <= named
    assert "make test" in (ROOT / ".ci" / "run").read_text()


MOST_FILES = 25  # of a tour: more are not opened by anybody
SOURCES = ROOT / "src" / "ostinato"


def tours(text: str) -> dict[str, list[str]]:
    """The files that each tour of the architecture's page names, in its order."""
    section = text.split("\n## Three tours\n")[1].split("\n## ")[0]
    _, *parts = re.split(r"^\*\*(.+?)\*\*", section, flags=re.MULTILINE)
    return {title: re.findall(r"`([\w/]+\.py)`", walk) for title, walk in zip(parts[::2], parts[1::2], strict=True)}


def imported(name: str) -> set[str]:
    """The files of `src/ostinato` that one imports, also within its functions."""
    found = set[str]()
    for node in ast.walk(ast.parse((SOURCES / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {module.removeprefix("ostinato.").replace(".", "/") + ".py" for module in found}


def off_the_road(files: list[str]) -> list[str]:
    """Those that import no file before them on the tour, and that none before them imports. A worker reads what others wrote."""
    joined = [imported(name) for name in files]
    return [
        name
        for at, name in enumerate(files)
        if at
        and not name.startswith("launch/workers/")
        and not joined[at] & set(files[:at])
        and not any(name in each for each in joined[:at])
    ]


def test_the_tours_lead_from_file_to_file():
    found = tours((ROOT / "docs" / "architecture.md").read_text())
    assert list(found) == [
        "A chat request, from HTTP to a row of the log",
        "Feedback, to a published version",
        "Why did v12 not ship?",
    ]
    for files in found.values():
        assert 10 < len(files) == len(set(files)) <= MOST_FILES
        assert [name for name in files if not (SOURCES / name).is_file()] == []
        assert off_the_road(files) == []


def test_a_planted_detour_is_found():
    assert off_the_road(["serve/gateway.py", "serve/auth.py", "train/losses.py"]) == ["train/losses.py"]
