"""The workflows below .github/ parse, run what a clone runs, and test every Python that the package claims."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(workflow):
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_every_job_ends_and_may_write_only_what_it_says(name):
    flow = WORKFLOWS[name]
    assert flow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in flow["jobs"].values())
    uses = [step["uses"] for step in steps(name) if "uses" in step]
    assert [each for each in uses if not re.search(r"@(v\d+|release/v\d+)$", each)] == []
    assert not re.search(r"secrets\.", (FOLDER / f"{name}.yml").read_text())


def test_every_python_that_is_claimed_is_tried_with_the_oldest_torch_too():
    prefix = "Programming Language :: Python :: 3."
    claimed = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith(prefix)}
    matrix = WORKFLOWS["ci"]["jobs"]["wheel"]["strategy"]["matrix"]
    assert set(matrix["python"]) == claimed
    assert min(claimed, key=lambda each: int(each[2:])) == PROJECT["requires-python"].removeprefix(">=")
    (oldest,) = (each.removeprefix("torch>=") for each in PROJECT["dependencies"] if each.startswith("torch>="))
    assert {each["torch"] for each in matrix["include"]} == {f"=={oldest}.0"}


def test_a_clone_is_tested_as_ci_does_it():
    assert ".ci/run" in [step.get("run") for step in WORKFLOWS["ci"]["jobs"]["clone"]["steps"]]


def test_what_is_published_was_built_and_checked_once():
    jobs = WORKFLOWS["release"]["jobs"]
    build, check = ("\n".join(step.get("run", "") for step in jobs[name]["steps"]) for name in ("build", "check"))
    assert "npm pack" in build
    assert "twine check --strict dist/ostinato/* dist/client/*" in check
    assert "ostinato --version" in check
    assert jobs["check"]["needs"] == "build"
    assert jobs["check"].get("permissions", {"contents": "read"}) == {"contents": "read"}
    for name in ("pypi", "npm"):
        assert jobs[name]["needs"] == ["build", "check"]
        assert jobs[name]["permissions"] == {"id-token": "write"}
        assert jobs[name]["environment"] == "release"
        assert not any("checkout" in step.get("uses", "") for step in jobs[name]["steps"])


def test_nothing_of_others_but_the_build_tool_is_installed_where_the_files_are_made():
    jobs = WORKFLOWS["release"]["jobs"]
    installs = [
        step["run"] for step in jobs["build"]["steps"] if re.search(r"\b(pip|npm) (install|ci)\b", step.get("run", ""))
    ]
    assert installs == ["pip install build==1.6.1"]
    assert jobs["build"]["steps"][-1]["uses"].startswith("actions/upload-artifact@")
    uploads = [name for name, job in jobs.items() for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert uploads == ["build"], "what is published is what the build job made"
    checkouts = [step for step in steps("release") if "checkout" in step.get("uses", "")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_the_steps_of_a_release_are_written_down():
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert ".github/workflows/release.yml" in told
    assert "git tag" in told
