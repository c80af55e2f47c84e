"""A short fuzzing campaign against everything that reads weights, and the proof that the campaign notices what it looks for."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S

ROOT = Path(__file__).parents[2]

PLANTED = """
import ctypes, os
from types import SimpleNamespace

class Source:
    def __init__(self, seed): self.made = 0
    def keep(self, case): pass
    def next(self):
        self.made += 1
        return Case(self.made)

class Case(SimpleNamespace):
    def __init__(self, number): super().__init__(number=number, about={"declared": 10})
    def to_bytes(self): return b"case %d" % self.number

def run(case):
    if case.number != 400:
        return "fine"
    match os.environ["PLANTED"]:
        case "write":
            from tests.examinations.fuzz.targets import Guarded
            place = Guarded(100).place(b"x" * 100, at_end=True)
            ctypes.memset(place.ctypes.data + 100, 1, 1)
        case "read":
            from tests.examinations.fuzz.targets import Guarded
            ctypes.string_at(Guarded(100).place(b"x" * 100, at_end=False).ctypes.data - 1, 1)
        case "hang":
            while True: pass
        case "memory":
            return "fine" if len(bytes(range(256)) * 800_000) else ""
        case "address":
            bytearray(1 << 40)
        case "error":
            raise KeyError("undocumented")
    return "fine"
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.chdir(ROOT)  # where the campaign's children find its modules
    return importlib.import_module("tests.examinations.fuzz.run")


@pytest.mark.examination
def test_a_short_campaign_finds_nothing(script, tmp_path):
    report = script.campaign(3.0, 3, tmp_path, checked=0.0, most=1, least=300)
    assert report.findings == []
    assert report.cases >= 300
    kinds = {outcome.split()[0].rstrip(":") for outcome in report.outcomes}
    assert {"decode", "manifest", "follow"} <= kinds
    assert any("as promised" in outcome for outcome in report.outcomes), "real payloads come through unharmed"


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("write", "died: exit status -11"),
        ("read", "died: exit status -11"),
        ("hang", "slow"),
        ("memory", "memory"),
        ("address", "MemoryError"),
        ("error", "KeyError"),
    ],
)
def test_a_planted_defect_is_found_and_its_case_is_kept(script, tmp_path, monkeypatch, what, found):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PLANTED", what)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(script, "CPU_S", 2.0)
    report = script.campaign(
        WHOLE_PROGRAM_S, 1, tmp_path / "found", checked=0.0, modules=("planted", "planted"), most=1
    )
    assert [finding["what"].removeprefix("FINDING ")[: len(found)] for finding in report.findings] == [found]
    assert Path(report.findings[0]["case"]).read_bytes() == b"case 400"


@pytest.mark.parametrize("unit", [b"1111,", b'[],"xxxxxxxxxxxxxx",', b'{"aaaaaaaaa":1},', b'"xxxxxx",'])
def test_a_bomb_of_a_manifest_is_refused_in_little_memory(unit):
    """In a process of its own, which knows what it took at most."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import zstandard
from tests.examinations.fuzz.run import forget_peak, memory
from ostinato.core.errors import Corrupt
from ostinato.weights.version.manifest import parse, plain
unit = {unit!r}
data = zstandard.compress(b'{{"tensors":[{{"shape":[' + unit * (8_000_000 // len(unit)) + b'0]}}]}}')
plain_data = plain(data)
forget_peak()
before = memory("VmRSS")
try:
    parse(plain_data)
except Corrupt:
    print(len(data), memory("VmHWM") - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WHOLE_PROGRAM_S, check=True
    )
    size, grown = map(int, done.stdout.split())
    assert size < 5000
    assert grown < 20 * 8_000_000
