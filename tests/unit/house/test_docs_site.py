"""The documentation's site: every page is in its navigation, and its links that leave docs/ lead to the repository."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAVIGATION = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]


def pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(each)


def test_every_page_stands_once_in_the_navigation():
    written = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(NAVIGATION)) == written


def copied(directory: Path, **environment: str) -> str:
    """The page of worlds, which links to a source file, as the site gets it."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    script = [sys.executable, str(ROOT / "docs" / "site.py"), str(directory)]
    subprocess.run(script, env={**outside, **environment}, check=True)
    assert not list(directory.rglob("*.py"))
    return (directory / "guide" / "worlds.md").read_text()


def test_a_link_that_leaves_the_docs_leads_to_the_repository(tmp_path):
    page = copied(tmp_path / "pages", GITHUB_SERVER_URL="https://git.example.com", GITHUB_REPOSITORY="someone/ostinato")
    assert "(https://git.example.com/someone/ostinato/blob/main/src/ostinato/worlds/tasks/rows.py)" in page
    assert "](../measurements/midtraining.md)" in page
    assert "../../" not in page


def test_without_an_address_only_the_text_of_such_a_link_stays(tmp_path):
    page = copied(tmp_path / "pages")
    assert "rows.py)" not in page
    assert "](../measurements/midtraining.md)" in page
