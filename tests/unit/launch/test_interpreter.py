"""What a worker has loaded is left out of later collections, and freed all the same; its threads take short turns and share heaps."""

import gc
import json
import platform
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.core.interpreter import HEAPS, SWITCH_INTERVAL_S, THRESHOLDS, collecting_rarely, settle, take_short_turns
from ostinato.launch.workers import serve as serving


class Weights:
    pass


def told(thresholds):
    """As Python tells them once they are set: 3.14 has no third one."""
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        return gc.get_threshold()
    finally:
        gc.set_threshold(*before)


def test_what_is_loaded_is_looked_through_no_more_and_freed_once_nothing_needs_it():
    usual = gc.get_threshold()
    weights = Weights()
    seen = weakref.ref(weights)
    try:
        settle()
        assert gc.get_freeze_count() > 10_000, "the interpreter and its modules"
        assert not any(each is weights for each in gc.get_objects())
        later = Weights()
        assert any(each is later for each in gc.get_objects())
        del weights
        assert seen() is None
    finally:
        assert gc.get_threshold() == told(THRESHOLDS)
        gc.unfreeze()
        gc.set_threshold(*usual)


def test_threads_take_short_turns_and_never_longer_ones_than_before():
    usual = sys.getswitchinterval()
    try:
        for before, after in ((0.005, SWITCH_INTERVAL_S), (SWITCH_INTERVAL_S / 2, SWITCH_INTERVAL_S / 2)):
            sys.setswitchinterval(before)
            take_short_turns()
            assert abs(sys.getswitchinterval() - after) < 2e-6  # whole microseconds
    finally:
        sys.setswitchinterval(usual)


async def test_the_threads_of_a_gateway_take_short_turns(monkeypatch):
    """Once it is open: while it loads, threads that give way more often only take longer."""
    usual, seen = sys.getswitchinterval(), []

    def refuse(*_):
        seen.append(sys.getswitchinterval())
        raise BadConfig("enough")

    monkeypatch.setattr(serving, "check_bind", refuse)
    monkeypatch.setattr(serving, "keep_heaps_small", lambda: seen.append("heaps"))
    run, opened = (
        SimpleNamespace(home=SimpleNamespace(address=None)),
        SimpleNamespace(engine=SimpleNamespace(contract=refuse)),
    )
    try:
        for begun in (serving.serve(Config(), None), serving._run(run, opened, *[None] * 5)):
            with pytest.raises(BadConfig, match="enough"):
                await begun
    finally:
        sys.setswitchinterval(usual)
    assert seen == ["heaps", usual, pytest.approx(SWITCH_INTERVAL_S, abs=2e-6)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives each thread a heap")
@pytest.mark.parametrize("shared", [False, True])
def test_threads_keep_heaps_small(shared, tmp_path):
    """Counted by glibc itself (`malloc_info`), in a process whose 12 threads hold memory at the same time."""
    code = f"""
import ctypes, threading
if {shared}:
    from ostinato.launch.workers.serve import keep_heaps_small
    keep_heaps_small()
libc, everyone = ctypes.CDLL(None), threading.Barrier(13)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def hold():
    libc.malloc(1000)
    everyone.wait()
    everyone.wait()
for _ in range(12): threading.Thread(target=hold).start()
everyone.wait()
told = libc.fopen({str(tmp_path / "told").encode()!r}, b"w")
libc.malloc_info(0, ctypes.c_void_p(told))
libc.fclose(ctypes.c_void_p(told))
everyone.wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    heaps = (tmp_path / "told").read_text().count("<heap nr=")
    assert heaps == HEAPS if shared else heaps > HEAPS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_a_large_block_goes_back_to_the_system_whatever_lies_above_it():
    """With glibc's own rules the second large block would lie on the heap, as a first of its size has been freed."""
    code = """
import ctypes
from ostinato.launch.workers.serve import keep_heaps_small
keep_heaps_small()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def kib(): return int(open("/proc/self/statm").read().split()[1]) * 4
def block():
    at = libc.malloc(16 << 20)
    ctypes.memset(ctypes.c_void_p(at), 1, 16 << 20)
    return at
libc.free(block())
large, above, full = block(), libc.malloc(100_000), kib()
libc.free(large)
print(full - kib())
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert int(said.stdout) > 15_000


IMPORTED = """
import gc, json, sys
looked, before = [], gc.get_threshold()
gc.callbacks.append(lambda phase, _: looked.append(1) if phase == "start" else None)
sys.argv = ["ostinato", "--version"]
from ostinato.cli import main
try:
    main()
finally:
    print(json.dumps([len(looked), gc.get_threshold() == before]))
"""


def test_the_command_line_is_imported_without_looking_for_garbage():
    """By Python's own thresholds it would be looked for 70 times; 14 are left, before and after it."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    looked, restored = json.loads(done.stdout.splitlines()[-1])
    assert looked < 40
    assert restored


def test_thresholds_that_a_worker_set_meanwhile_stay():
    before = gc.get_threshold()
    try:
        with collecting_rarely():
            assert gc.get_threshold() == pytest.approx(told(THRESHOLDS), abs=1)
        assert gc.get_threshold() == before
        with collecting_rarely():
            gc.set_threshold(60_000, 5, 5)
        assert gc.get_threshold() == told((60_000, 5, 5))
    finally:
        gc.set_threshold(*before)


def test_what_a_worker_settled_meanwhile_stays():
    before = gc.get_threshold()
    try:
        with collecting_rarely(), collecting_rarely():
            settle()
        assert gc.get_threshold() == told(THRESHOLDS)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_thresholds_come_back_where_python_tells_no_third_one(monkeypatch):
    """As Python 3.14 does, whatever was set."""
    before, really = gc.get_threshold(), gc.get_threshold
    monkeypatch.setattr(gc, "get_threshold", lambda: (*really()[:2], 0))
    try:
        with collecting_rarely():
            assert really()[:2] == pytest.approx(THRESHOLDS[:2], abs=1)
        assert really()[:2] == before[:2]
        with collecting_rarely():
            settle()
        assert really()[:2] == THRESHOLDS[:2]
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
