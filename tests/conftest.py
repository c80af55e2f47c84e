"""Settings and fixtures about the machine that the tests run on."""

import gc
import itertools
import os
import shlex
import sys

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch: threads that spin starve each other on a busy machine

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy, for the same reason: its products here are small

# before torch, which may import Triton: without a GPU its kernels run in its interpreter
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("OSTINATO_TEST_DEVICE") else "1")

import pytest
from hypothesis import settings
from tests import rewriting, scheduling
from tests.fakes import fork_server
from tests.fakes.fork_server import FORK_SERVER, OF_TESTS, SHARED
from tests.fakes.postgres_server import started

settings.register_profile("ours", deadline=None)  # the duration of a case depends only on the machine
settings.load_profile("ours")


_LONG_NAME = 60  # characters


def pytest_xdist_auto_num_workers():
    """The number of workers that `-n auto` means."""
    named = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", "")
    return int(named) if named.isdigit() else scheduling.workers()


def pytest_sessionstart(session):
    """Start one fork server for all workers of pytest-xdist, while they collect."""
    if getattr(session.config.option, "tx", None) and not hasattr(session.config, "workerinput"):
        os.environ[SHARED] = FORK_SERVER.start(OF_TESTS)


def pytest_xdist_setupnodes(specs):
    """Have the workers of pytest-xdist forked by that server: each of them would import the same libraries for 10 s."""
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = f"{shlex.quote(sys.executable)} {shlex.quote(fork_server.__file__)}"


def pytest_configure(config):
    """In a forked worker: as many threads as a process that was started has. The server has one."""
    if hasattr(config, "workerinput") and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect without the garbage collector, which would look through all modules and tests again and again, then and later."""
    gc.disable()
    try:
        rewriting.rewrite_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_make_parametrize_id(val):
    """Name a long text by its beginning: a test's name is sent to other processes, and is in the environment of all that it starts."""
    if isinstance(val, str | bytes) and len(val) > _LONG_NAME:
        return f"{val[:_LONG_NAME]!a} of {len(val)}"
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which writes the groups into the names of the tests
def pytest_collection_modifyitems(config, items):
    """In a worker with `--dist loadgroup`: keep together what shares a costly fixture, longest first."""
    if getattr(config.option, "loadgroup", False):
        scheduling.schedule(items, scheduling.read_durations())


def pytest_unconfigure():
    """End the fork server, if there was one; by now the workers that it forked have ended."""
    FORK_SERVER.close()


@pytest.fixture(scope="session")
def postgres_server():
    """A running Postgres server that belongs to this test process."""
    with started() as server:
        yield server


_SCHEMAS = itertools.count()


@pytest.fixture
def in_postgres(postgres_server):
    """Makes configurations of a log that only this test uses: ``in_postgres(segment_rows=3)``. Each call names the same log."""
    from ostinato.record.config import RecordConfig

    namespace = f"log_{next(_SCHEMAS)}"
    patient = {"append_s": 60.0}  # the machine may be busy
    return lambda **settings: RecordConfig(url=postgres_server.url, namespace=namespace, **(patient | settings))
