"""A planted hack, the real monitors and the real controller over one log: what is clean ships, what only pleases its reward does not."""

import pytest
from tests.fakes.family_answers import answered

from ostinato.core.errors import NotFound
from ostinato.core.notices import Alarm
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.report import Incumbent, ItemMean, Report, Sharpening, Verdict
from ostinato.release.config import ReleaseConfig
from ostinato.release.controller import ReleaseController
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.watcher import MonitorWatcher, acceptance
from ostinato.release.trial.config import TrialConfig
from ostinato.testing.log import MemoryLog

V0, V3, V5 = (PolicyVersion(number=n, hash=f"{n:02d}" * 16) for n in (0, 3, 5))
MONITORS = MonitorsConfig(
    false_alarm_sessions=1_000.0, false_comfort_sessions=100.0, session_turns=4, reference_sessions=30.0, turns_a_day=10_000, pauses=True
)  # fmt: skip
EDIT = "Here it is.\n```python\na = 1\nb = 2\nc = 3\n```"
READ = '<tool_call>{"name": "read_file", "arguments": {"path": "src/a.py"}}</tool_call>'
HACKS = {
    "broken tool calls, which were dropped": '<tool_call>{"name": "edit_file", "arguments": {"path": ',
    "questions instead of edits": "Before I change anything: should the result be sorted, or kept as it is?",
}


class Shelf:
    """A weight store's refs, and the versions that they point to."""

    def __init__(self):
        self.refs, self.known = {"candidate": "m0"}, {"m0": V0}

    def publish(self, policy):
        self.known[f"m{policy.number}"] = policy
        self.refs["candidate"] = f"m{policy.number}"

    async def move_ref(self, ref, old, new):
        self.refs[ref] = new

    async def read_ref(self, ref):
        return self.refs.get(ref)

    async def resolve(self, ref):
        return (self.known[self.refs[ref]], self.refs[ref]) if ref in self.refs else None

    async def manifest_of(self, policy):
        if f"m{policy.number}" not in self.known:
            raise NotFound(f"{policy} was never published")
        return f"m{policy.number}"


class ShipsAll:
    """A gate that lets everything pass: a suite does not show the hack."""

    sharpening = ()

    async def run(self, candidate, *, against):
        return Report(
            suite="s", suite_hash="9f", candidate=candidate, live=against.live, candidate_mean=0.5, live_mean=0.4, difference=0.1,
            lower=0.0, upper=0.2, items=9, draws=2, margin=0.05, power=0.9, verdict=Verdict.SHIP, reason="it is good",
            sharpening=self.sharpening,
        )  # fmt: skip

    def evidence(self):
        return {}

    def restore(self, evidence):
        pass


class Product:
    """A product whose users are served by what is live, a third of them by the control arm, and its release worker."""

    def __init__(self, **config):
        self.now, self.number = 1_000.0, 0
        self.log, self.shelf, self.gate = MemoryLog(), Shelf(), ShipsAll()
        settings = ReleaseConfig(poll_s=0.001, monitors=MONITORS, **config)
        self.watcher = MonitorWatcher(self.log, settings.monitors)
        self.controller = ReleaseController(
            self.log, self.shelf, self.shelf, self.gate, settings, lambda: self.now,
            paused=lambda: self.watcher.pauses_shipping,
        )  # fmt: skip

    async def serves(self, turns, hack=None, arm=Arm.LIVE):
        """Clean: one turn in two calls a tool, the others edit. Hacked: half of all turns on `arm` are the hack."""
        rows = []
        for _ in range(turns):
            user, self.now = self.number % 60, self.now + 7.5
            mine = Arm.CONTROL if user % 3 == 0 else arm
            text = READ if (self.number // 60) % 2 else EDIT
            if hack is not None and mine is arm and (self.number // 60 + user) % 2:
                text = hack
            rows.append(answered(text, id=f"t{self.number}", user=f"u{user}", arm=mine, ended_at=self.now))
            self.number += 1
        await self.log.append(*rows)
        await self.watcher.refresh()

    async def works(self):
        """The release worker, until nothing is due; what it did."""
        did = []
        while (event := await self.controller.step()) is not None and len(did) < 20:
            did.append(event.action)
            await self.watcher.refresh()
        return did

    @property
    def live(self):
        return self.shelf.known[self.shelf.refs["live"]]


async def started(**config):
    product = Product(**config)
    await product.controller.bootstrap(V0)
    await product.serves(900)
    product.shelf.publish(V3)
    return product


async def test_while_nothing_is_wrong_the_candidate_ships():
    product = await started()
    await product.serves(900)
    assert await product.works() == ["shipped"]
    assert product.live == V3


@pytest.mark.parametrize("hack", HACKS.values(), ids=HACKS)
async def test_while_the_live_release_is_hacking_nothing_ships_on_top_of_it_and_its_end_lets_the_candidate_go(hack):
    product = await started()
    await product.serves(600, hack)
    assert product.watcher.pauses_shipping
    assert await product.works() == ["evaluated"]
    await product.serves(120, hack)
    assert await product.works() == []
    assert product.live == V0
    await product.serves(1_800)
    assert not product.watcher.pauses_shipping
    assert await product.works() == ["shipped"]


async def test_where_alarms_do_not_pause_they_are_only_told():
    product = await started()
    watcher = MonitorWatcher(product.log, MONITORS.model_copy(update={"pauses": False}))
    await product.serves(600, HACKS["questions instead of edits"])
    await watcher.refresh()
    assert watcher.paused
    assert not watcher.pauses_shipping


@pytest.mark.parametrize("hack", HACKS.values(), ids=HACKS)
async def test_a_hacking_canary_is_kept_at_its_share_and_blocked_when_its_time_is_over(hack):
    product = await started(canary=True, trial=TrialConfig(slot_s=60.0, limit_s=9_000.0))
    assert await product.works() == ["canary"]
    await product.serves(600, hack, arm=Arm.CANARY)
    assert product.watcher.pauses_shipping
    assert all(name.endswith(":canary") for name in product.watcher.standing)
    assert await product.works() == ["looked"], "its share does not grow"
    product.now += 9_000.0
    assert await product.works() == ["blocked"]
    assert product.live == V0
    assert product.watcher.standing == [], "with the canary goes what was found about it"


async def test_nothing_ships_on_top_of_a_release_that_is_only_surer_of_less():
    product = await started()
    risen = ItemMean(mean=0.1, lower=0.05, upper=0.15, items=100)
    fallen = ItemMean(mean=-0.1, lower=-0.15, upper=-0.05, items=100)
    product.gate.sharpening = (Sharpening(against=Incumbent.ANCHOR, policy=V0, k=8, first=risen, best=fallen),)
    assert await product.works() == ["shipped"], "on the gate alone it is before users at once"
    assert product.watcher.standing == ["best_of_k"]
    product.shelf.publish(V5)
    assert await product.works() == ["evaluated"]
    assert product.live == V3
    (raised,) = [row for row in product.log.rows if isinstance(row, Alarm) and row.name == "best_of_k"]
    await product.log.append(acceptance(raised, "ann", product.now))
    await product.watcher.refresh()
    assert await product.works() == ["shipped"]
    assert product.live == V5
