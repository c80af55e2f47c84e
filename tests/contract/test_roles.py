"""The contract of `Roles`, tested on every implementation: one process at a time holds a role, and another gets it once it is dead."""

import asyncio
import subprocess
import sys
from contextlib import closing

import psycopg
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.role_holder import roles_of

from ostinato.app.roles import wait_for
from ostinato.core.errors import BadConfig, Conflict
from ostinato.record.config import RecordConfig

LEASE_S = 600.0  # longer than any pause of a busy machine


@pytest.fixture(params=["file", "postgres"])
def place(request, tmp_path):
    """The place of the roles, as an argument of `roles_of`."""
    if request.param == "file":
        return str(tmp_path)
    return request.getfixturevalue("in_postgres")(lease_s=LEASE_S, append_s=600).model_dump_json()


def lapse(place):
    """The time of a lease passes, at the server whose clock alone decides, without a sign of life."""
    if place.startswith("{"):
        config = RecordConfig.model_validate_json(place)
        with psycopg.connect(config.url) as server:
            server.execute(f"UPDATE \"{config.namespace}\".leases SET until = until - %s * interval '1 s'", (LEASE_S,))


@pytest.fixture
def roles(place):
    return roles_of(place)


def test_one_at_a_time_and_the_next_when_it_is_given_back(roles):
    with closing(roles.take("train")) as held:
        with pytest.raises(Conflict, match=r"another train process .*stop it"):
            roles.take("train")
        held.check()
        assert not held.lost
    held.close()
    with closing(roles.take("train")) as held:
        held.check()


def test_roles_do_not_disturb_each_other(roles):
    with closing(roles.take("train")), closing(roles.take("release")):
        pass


@pytest.mark.parametrize("role", ["", "../up", "a/b", "Serve", "x" * 40, "a\x00b"])
def test_a_role_is_a_plain_name(roles, role):
    with pytest.raises(BadConfig):
        roles.take(role)


async def test_kill_9_frees_it_and_who_waits_gets_it(place, roles):
    command = [sys.executable, "-m", "tests.fakes.role_holder", place, "train"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - it does not block
    with process, process.stdout:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(Conflict):
            roles.take("train")
        told = []
        waiting = asyncio.create_task(wait_for(roles, "train", told.append))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not told:
                await asyncio.sleep(0.01)
        process.kill()
        process.wait()
        lapse(place)
        held = await waiting
    assert f"{process.pid}" in told[0]
    assert len(told) == 1
    with closing(held):
        held.check()


async def test_who_gives_up_waiting_leaves_nothing_held(roles):
    with closing(roles.take("train")):
        told = []
        waiting = asyncio.create_task(wait_for(roles, "train", told.append))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not told:
                await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with closing(await wait_for(roles, "train", told.append)):
        pass
