"""The two wheels and their source distributions hold what they need and nothing else, and the command line runs from the wheel alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S

pytest.importorskip("hatchling", reason="needs hatchling, which builds the wheels: pip install 'ostinato[dev]'")

ROOT = Path(__file__).parents[3]
PACKAGES = {"ostinato": ROOT, "ostinato_client": ROOT / "client"}
NAMES = list(PACKAGES)
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
print({"sdist": build_sdist, "wheel": build_wheel}[sys.argv[1]](sys.argv[2]))
"""
HELP = [
    "demo",
    "demo worlds",
    "up",
    "worlds",
    "worlds build",
    "connect",
    "doctor",
    "log",
    "status",
    "watch",
    "weights",
    "report",
]
RUN = """
import contextlib, io, json, sys
from ostinato.cli import main
from ostinato.cli.commands import app
for words in json.load(sys.stdin):
    sys.argv, told, code = ["ostinato", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([words, code, told.getvalue()]))
places = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("ostinato") and module.__file__}
print(json.dumps([["torch" in sys.modules], 0, places]))
"""


def built(kind: str, source: Path, out: Path) -> Path:
    words = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=WHOLE_PROGRAM_S, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each package's source distribution, made without git of files alone, and the wheel that is made of what the distribution holds."""
    place, found = tmp_path_factory.mktemp("wheels"), {}
    clone = place / "clone"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "tests", "benchmarks", "typings")
    shutil.copytree(ROOT, clone, ignore=ignored)
    for name, source in PACKAGES.items():
        sdist = built("sdist", clone / source.relative_to(ROOT), place)
        with tarfile.open(sdist) as archive:
            archive.extractall(place / name, filter="data")
        (unpacked,) = (place / name).iterdir()
        found[name] = (unpacked, built("wheel", unpacked, place))
    return found


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_holds_every_file_of_its_package_and_nothing_else(made, name):
    package = PACKAGES[name] / "src" / name
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    found = members(made[name][1])
    info = {each for each in found if each.partition("/")[0].endswith(".dist-info")}
    assert found - info == {f"{name}/{path.relative_to(package).as_posix()}" for path in files}
    assert {each.rpartition("/")[2] for each in info} - {"entry_points.txt"} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "LICENSE",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_source_distribution_holds_no_link_and_no_test(made, name):
    unpacked, _ = made[name]
    paths = list(unpacked.rglob("*"))
    assert [path for path in paths if path.is_symlink()] == []
    assert {"src", "LICENSE", "pyproject.toml"} <= {path.name for path in unpacked.iterdir()}
    assert not {"tests", "benchmarks", "deploy", "js"} & {path.name for path in unpacked.iterdir()}
    assert (unpacked / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_wheels_page_links_to_no_file_of_the_clone(made, name):
    told = metadata(made[name][1])
    text = told.get_payload()
    assert told["Description-Content-Type"] == "text/markdown"
    assert len(text) > 500
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []


def test_an_extra_that_a_message_names_is_declared(made):
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"'ostinato\[(\w+)\]'", text)}
    declared = set(metadata(made["ostinato"][1]).get_all("Provides-Extra"))
    assert {"postgres", "ray", "worlds", "corpus", "e2b"} <= named <= declared
    assert "watch" in declared, "the extra's old name, for one release"
    table = (ROOT / "docs" / "package.md").read_text()
    assert [extra for extra in named if f"`{extra}`" not in table] == []


def test_every_package_has_the_version_that_the_changelog_ends_with():
    (version,) = re.findall(r'__version__ = "([^"]+)"', (ROOT / "src" / "ostinato" / "__init__.py").read_text())
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]["version"]
    js = json.loads((ROOT / "client" / "js" / "package.json").read_text())["version"]
    (newest, *_) = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {client, js, newest} == {version}
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ostinato-client=={version}" in dependencies


@pytest.fixture(scope="module")
def ran(made, tmp_path_factory):
    """What commands said and how they ended, run in an empty directory by an interpreter that finds the wheel before everything else."""
    place, empty = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("empty")
    wheels = [str(made[name][1]) for name in NAMES]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(place),
    ]
    subprocess.run([*pip, *wheels], check=True, timeout=WHOLE_PROGRAM_S)
    commands = [["--help"], ["--version"], *([*words.split(), "--help"] for words in HELP)]
    commands += [["status"], ["log"], ["config"], ["connect"], ["worlds", "show", "nowhere"]]
    commands += [[command, "--set", "model.source=/nowhere"] for command in ("up", "demo")]
    environment = {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(place),
        "HOME": str(tmp_path_factory.mktemp("home")),
        "COLUMNS": "140",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=empty,
        env=environment,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = map(json.loads, done.stdout.splitlines())
    found = {" ".join(words): (code, text) for words, code, text in lines}
    return found, last[2], place, list(empty.iterdir()), last[0][0]


def test_help_and_version_run_from_the_wheel(ran):
    found, _, _, _, _ = ran
    assert found["--version"] == (0, f"{found['--version'][1].strip()}\n")
    for words, (code, text) in found.items():
        if words.endswith("--help"):
            assert code in (0, None), words
            assert "Usage: ostinato" in text, words


def test_commands_without_a_run_say_what_to_do_and_leave_nothing(ran):
    found, _, _, left, _ = ran
    for words in ("status", "log"):
        assert found[words][0] == 2
        assert "start one with `ostinato up`" in found[words][1]
    assert found["config"][0] in (0, None)
    assert "claude-code" in found["connect"][1]
    for words in ("up", "demo"):
        code, text = found[f"{words} --set model.source=/nowhere"]
        assert code == 2
        assert "no such directory" in text
    assert "Traceback" not in str(found)
    assert left == []


def test_all_of_it_came_from_the_wheel_and_torch_from_nowhere(ran):
    _, places, target, _, torch = ran
    assert len(places) > 50
    assert [name for name, file in places.items() if not Path(file).is_relative_to(target)] == []
    assert not torch


def test_the_scripts_are_installed(ran):
    _, _, target, _, _ = ran
    for name in ("ostinato", "ostinato-connect"):
        assert os.access(target / "bin" / name, os.X_OK)


def test_an_agent_is_connected_where_only_the_client_is_installed(made, tmp_path):
    """As on a laptop: nothing is there but the client's wheel and the standard library."""
    place, home = tmp_path / "client", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(made["ostinato_client"][1]) as archive:
        archive.extractall(place)
    words = ["aider", "--url", "http://127.0.0.1:8321", "--model", "m", "--yes"]
    for also in ([], ["--undo"]):
        done = subprocess.run(
            [sys.executable, "-S", "-m", "ostinato_client.connect", *words, *also],
            cwd=home,
            env={"PYTHONPATH": str(place), "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=WHOLE_PROGRAM_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert (home / ".aider.conf.yml").exists() is not bool(also)
    assert list(home.iterdir()) == []
