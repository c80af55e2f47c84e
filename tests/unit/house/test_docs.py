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
    "docs/guide.md",
    "docs/LOG.md",
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


def test_the_readmes_commands_are_the_makefiles():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text())) - {"and", "nothing"}
    assert named <= targets, named - targets
    assert {"demo", "test"} <= named
    assert "make test" in (ROOT / ".ci" / "run").read_text()
