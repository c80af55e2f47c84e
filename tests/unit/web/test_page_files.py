"""What the page loads: scripts of others as they were published, within the page's budget, and nothing from elsewhere."""

import hashlib
import tomllib
from pathlib import Path

from tests.fakes.page_world import page_world

import ostinato.web.page

STATIC = Path(ostinato.web.page.__file__).parents[1] / "static"
BUDGET = 150_000  # bytes of a page with all that it loads, uncompressed


def test_scripts_of_others_are_as_they_were_published_with_their_licences():
    vendor = STATIC / "vendor"
    named = {"vendor.toml"}
    for package in tomllib.loads((vendor / "vendor.toml").read_text()).values():
        assert (vendor / package["licence_file"]).stat().st_size > 100
        named |= {package["licence_file"], *package["files"]}
        for name, file in package["files"].items():
            assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == file["sha256"], name
    assert {path.name for path in vendor.iterdir()} == named


async def test_a_page_with_all_that_it_loads_keeps_its_budget():
    loaded = sum(path.stat().st_size for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".svg"))
    async with page_world() as w:
        for path in ("/", "/releases", "/turns", "/learning", "/monitors", "/weights", "/playground"):
            assert loaded + len((await w.get(path)).content) < BUDGET, path
