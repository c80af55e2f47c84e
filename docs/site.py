"""The pages of docs/ as the site is built from them: a link that leaves docs/ leads to the repository.

    python docs/site.py DIRECTORY

The repository's address is the one that GitHub's workflows know; elsewhere, only the text of such links stays.
"""

import os
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def written(page: Path, repository: str) -> str:
    """The page's text for the site."""

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        path = target.relative_to(DOCS.parent).as_posix()
        return f"[{found[1]}]({repository}/blob/main/{path}{found[3] or ''})" if repository else found[1]

    return LINK.sub(link, page.read_text())


if __name__ == "__main__":
    directory, repository = Path(sys.argv[1]), os.environ.get("GITHUB_REPOSITORY", "")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(DOCS, directory, ignore=shutil.ignore_patterns("*.py", "*.lock", "__pycache__"))
    for page in directory.rglob("*.md"):
        address = f"{os.environ['GITHUB_SERVER_URL']}/{repository}" if repository else ""
        page.write_text(written(DOCS / page.relative_to(directory), address))
