"""What a collection of weights keeps of a run."""

from ostinato.app.retention import needed
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.records import PolicyVersion, ReleaseEvent


def line(number, action):
    policy = PolicyVersion(number=number, hash=f"{number:064x}")
    return ReleaseEvent(
        id=f"{number}:{action}", action=action, policy=policy, previous=None, reason="", detail={}, at=float(number)
    )


async def test_what_waits_for_a_person_is_kept_however_long_they_take(tmp_path):
    config = load(None, [f"run.directory='{tmp_path}/run'", "collect.releases=2"])
    with open_run(config) as run:
        lines = [line(0, "shipped"), line(1, "awaits_approval"), line(2, "shipped"), line(3, "blocked")]
        await run.log.append(*lines, line(4, "awaits_approval"), *(line(n, "blocked") for n in range(5, 40)))
        assert await needed(run.log, config) == [f"{number:064x}" for number in (2, 0, 4)]
