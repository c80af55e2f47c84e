"""What several tests need to know of the machine that they run on."""

import itertools
import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # before torch: threads that spin starve each other on a busy machine

import pytest
import torch
from hypothesis import settings
from tests.fakes.postgres_server import started

settings.register_profile("ours", deadline=None)  # how long a case takes says something about the machine only
settings.load_profile("ours")


@pytest.fixture(scope="session")
def row_rule():
    """The row rule that the self-test finds here: ``row_rule(directory, dtype, threads=(1, 2))``, measured once for each architecture.

    A test that asks fails where exact mode cannot hold on this machine, with the self-test's reason.
    """
    from ostinato.engine.embedded.form import prepack
    from ostinato.model.selftest import examine

    verdicts = {}

    def rule(path, dtype, threads=(1,)):
        kind = ((path / "config.json").read_text(), dtype, threads)  # weights are no part of it
        if kind not in verdicts:
            before = torch.get_num_threads()
            verdicts[kind] = examine(path, dtype, threads, prepack)
            torch.set_num_threads(before)
        verdict = verdicts[kind]
        assert verdict.exact, verdict.reason
        return verdict.rows

    return rule


@pytest.fixture(scope="session")
def postgres_server():
    """A running server of this test process's own."""
    with started() as server:
        yield server


_SCHEMAS = itertools.count()


@pytest.fixture
def in_postgres(postgres_server):
    """The configuration of a log of the test's own: ``in_postgres(segment_rows=3)``; the same log at each call."""
    from ostinato.record.config import RecordConfig

    namespace = f"log_{next(_SCHEMAS)}"
    patient = {"append_s": 60.0}  # the machine may be busy
    return lambda **settings: RecordConfig(url=postgres_server.url, namespace=namespace, **(patient | settings))
