"""Who was forgotten is in no fold of a run's log and in no file but those that the guide names; what others gave stays as it was."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ostinato.adapt.learner import Prior, Regression
from ostinato.adapt.state_fold import StateFold, StateRules
from ostinato.app.erasure import ErasureFiles, ErasureRequest
from ostinato.core.records import Arm, Holdback, Pick, PolicyVersion, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.record import folds as fold_files
from ostinato.record.config import Encrypt, RecordConfig
from ostinato.record.folds import FileFolds
from ostinato.record.log import SqlLog
from ostinato.record.person_cache import SqlPersonCache
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.router import FoldedRouter
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.watcher import MonitorWatcher
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.run_directory import Home
from ostinato.status import summary
from ostinato.status.log_index import Feed, PageIndex
from ostinato.testing.records import a_delivery, a_signal, a_turn

V0 = PolicyVersion(number=0, hash="00")
NAME, OTHER = "zanzibarina", "quokkabert"
USERS = [NAME, OTHER, *(f"u{i}" for i in range(8))]
DIALS = Basis(("brief",), np.array([2, 7]), np.array([[1.0, -0.5]], np.float32), "9f")
BASIS = SteeringBasis.of(DIALS, at=1.0)
STEERED = Steered(basis=BASIS.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=5, kl=0.1, features=(0.2,))
LISTED = {"log", "log-keys.db"}
"""Where the guide says that a name stays: rows of the log, and whose a destroyed key was."""


@pytest.fixture(autouse=True)
def uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written can be looked for only if it is not compressed."""
    monkeypatch.setattr(fold_files, "pack_fold", lambda cursor, state: json.dumps([cursor, state]).encode())
    monkeypatch.setattr(fold_files, "unpack_fold", lambda data: tuple(json.loads(data)))


class Everything:
    """A run's log, and all that is folded from it, by the code of its workers."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.draw, self.number = root, 1000.0, random.Random(5), 0
        config = RecordConfig(encrypt=Encrypt.USER, segment_rows=60)
        self.log, folds = SqlLog.open(root / "log", self.clock, config), FileFolds(root / "folds")
        self.folds = folds
        reward = RewardConfig(user_cap=1.0)
        self.desk = RewardDesk(self.log, Inline(copilot, max_abs=reward.max_abs), self.clock, reward, folds=folds)
        monitors = MonitorsConfig(outcomes=("returned", "accepted"), start_turns=10_000, session_turns=50)
        self.monitors = MonitorWatcher(self.log, monitors, folds)
        self.auto = FoldedRouter(self.log, folds, self.clock, ["live", "control"], RouterConfig())
        self.index = PageIndex(root / "page.sqlite", words=False)
        self.feed = Feed(self.log, self.index, lambda: True)
        ring = self.log.keys
        self.cache = SqlPersonCache(root / "folds" / "people.sqlite", ring, Encrypt.USER, most=100)
        prior = Prior(mean_D=np.zeros(2), covariance_DD=0.1 * np.eye(2))
        rules = StateRules(names=("brief",), signals={"accepted": 1.0}, regression=Regression(), prior=prior)
        self.people = StateFold(self.log, self.cache, rules)
        self.summary = summary.Summary()

    def clock(self) -> float:
        self.now += 1e-3
        return self.now

    async def serve(self, turns: int) -> None:
        for _ in range(turns):
            user, arm = USERS[self.number % len(USERS)], Arm.CONTROL if self.number % 4 == 0 else Arm.LIVE
            made = a_turn(f"t{self.number}:0", user=user, arm=arm, ended_at=self.clock())
            pick = Pick(arm=arm.value, odds={"live": 0.75, "control": 0.25})
            made = replace(made, propensity=0.5, auto=pick, episode=f"e{self.number // 20}", steered=STEERED)
            name = "accepted" if self.draw.random() < 0.6 else "rejected"
            await self.log.append(made, a_signal(made, name, at=self.now), a_delivery(made, at=self.now))
            self.number += 1

    async def learn(self) -> None:
        self.now += 4000.0
        await self.desk.batch(self.desk.last_step + 1, 8, V0)

    async def catch_up(self) -> None:
        await self.desk.poll()
        await self.monitors.refresh()
        await self.auto.catch_up()
        await self.people.catch_up()
        await self.people.save()
        while await self.feed.step():
            pass
        await summary.catch_up(self.summary, self.log)
        await summary.keep(self.summary, self.folds)

    async def save(self) -> None:
        await self.desk.save()
        await self.monitors.save()
        await self.auto.save()

    def holding(self, name: str) -> set[str]:
        """The files, or folders of the log, that hold a name readable. Rows of a segment are compressed."""
        files = [path for path in self.root.rglob("*") if path.is_file() and name.encode() in path.read_bytes()]
        return {
            path.relative_to(self.root).parts[0] if "log" in path.parts else path.name.removesuffix("-wal")
            for path in files
        }

    def close(self) -> None:
        self.index.close()
        self.cache.close()
        self.log.close()


FOLDS = {"desk.fold", "monitors.fold", "auto.fold", "status.fold", "page.sqlite"}


async def test_a_forgotten_name_is_in_no_file_but_the_log_and_its_keys(tmp_path):
    run = Everything(tmp_path)
    try:
        await run.log.append(BASIS)
        await run.people.start()
        await run.serve(200)
        await run.catch_up()
        await run.learn()
        await run.serve(40)  # which wait to be learned from
        await run.catch_up()
        await run.save()
        assert run.holding(NAME) >= FOLDS, "it would be found"
        assert run.people.state(("default", NAME)) is not None
        ledger = run.desk._reading.ledger
        open_ = [entry.facts for entry in (*ledger.open.values(), *ledger.matured.values())]
        waiting = {facts.id for facts in open_ if facts.user == NAME and facts.hold is None}
        assert waiting
        await run.log.forget("default", NAME)
        await run.catch_up()
        assert run.holding(NAME) <= LISTED
        assert run.holding(OTHER) >= FOLDS, "nobody else goes"
        assert run.people.state(("default", NAME)) is None
        await run.desk.poll()
        held = [row async for _, row in run.log.read(0, {Holdback})]
        assert {row.turn for row in held if row.reason == "forgotten"} == waiting
    finally:
        run.close()


def test_two_who_ask_for_a_replay_at_once_are_both_served(tmp_path, monkeypatch):
    """The second comes between the first one's reading and writing of the requests, and a trainer takes one up beside a third."""
    files, there = ErasureFiles(Home(tmp_path)), ErasureFiles(Home(tmp_path))
    ann, bob, eve = (ErasureRequest(tenant="t", user=user, upto=9) for user in ("ann", "bob", "eve"))
    begun: list[threading.Thread] = []

    def between(request):
        def put(name, value):
            begun.append(threading.Thread(target=there.request, args=(request,)))
            begun[-1].start()
            begun[-1].join(0.2)  # it waits for the lock; without one it is over now, and what it wrote is overwritten
            ErasureFiles.put(files, name, value)

        return put

    monkeypatch.setattr(files, "put", between(bob))
    files.request(ann)
    begun[-1].join()
    assert files.requests() == [ann, bob]
    monkeypatch.setattr(files, "put", between(eve))
    files.remove([ann])
    begun[-1].join()
    assert files.requests() == [bob, eve]
