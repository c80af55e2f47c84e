"""What the documents name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/decisions/README.md",
    "docs/LOG.md",
    "docs/models.md",
    "docs/numerics.md",
    "deploy/README.md",
    "client/README.md",
    "benchmarks/README.md",
    "examples/README.md",
    "tests/examinations/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs" / "guide").glob("*.md"))),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text())
    own = [(document.parent / link if link else document, part) for link, part in links if "://" not in link]
    assert [target for target, _ in own if not target.exists()] == []
    assert [(target, part) for target, part in own if part and part not in headings(target)] == []


def headings(document: Path) -> set[str]:
    """What a link can name within a document, as GitHub makes it of its headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readmes_commands_are_the_makefiles():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text())) - {"and", "nothing"}
    assert named <= targets, named - targets
    assert {"demo", "test"} <= named
    assert "make test" in (ROOT / ".ci" / "run").read_text()
