"""The read model of one run: what the page, `release show` and the report query about it.

Times are Unix seconds, shares and differences are in [-1, 1], sizes are bytes. An unknown figure is None; 0 is a known figure.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from ostinato.core.clock import wall_clock
from ostinato.core.files import disk_use
from ostinato.core.notices import Alarm
from ostinato.core.records import Batch, Quarantine, ReleaseEvent, Reward, Signal, Turn
from ostinato.core.seams import Clock, Cursor, Identity, R
from ostinato.record.config import Encrypt
from ostinato.record.rowlog import RowLog
from ostinato.release.monitors.watcher import acceptable
from ostinato.reward.functions import parts_of
from ostinato.run_directory import Run
from ostinato.status import index_queries
from ostinato.status.branches import BranchReader
from ostinato.status.log_index import WAITING, Feed, PageIndex
from ostinato.status.release_evidence import EvidenceReader, carried, gate_looks
from ostinato.status.releases import LedgerEvent, ReleaseDetail, ReleaseList
from ostinato.status.run_state import RunNow, RunStateReader
from ostinato.status.training_state import LearningNow, TrainLines, WeightsNow, followers
from ostinato.weights.version.content import version_ref

INDEX = "page.sqlite"
_SHOWN = 20
"""How many turns are shown as examples of an alarm."""
WATCHED_S = 60.0
"""The page counts as watched for this long after a query."""
_DISK_S = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLine:
    """One turn in a list: its row in the index, the turn itself, and the names of its signals."""

    row: index_queries.IndexedTurn
    turn: Turn
    signals: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnList:
    """A page of turns, without those that the log no longer has. `unread`: how many rows of the log are not in the index yet.

    `searchable`: whether answers can be searched by word; not if they are encrypted.
    """

    rows: tuple[TurnLine, ...]
    page: index_queries.TurnPage
    unread: int
    searchable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDetail:
    """One turn in full. `prompt` and `sampled` are the bytes of each token, b"" for a control token. `advantage`: of its first token.

    `released`: the first release whose training included the turn. `parts`: the parts of the reward, if they are known.
    """

    line: TurnLine
    prompt: tuple[bytes, ...]
    sampled: tuple[bytes, ...]
    signals: tuple[Signal, ...]
    retracted: frozenset[str]
    function: str | None
    decided_at: float | None
    advantage: float | None
    released: LedgerEvent | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmDetail:
    """The last change of one alarm, with example turns. `acceptable`: a person may end it.

    `id` is the id of that change's log row, so that nobody accepts an alarm that they have not seen.
    """

    line: index_queries.AlarmLine
    id: str
    acceptable: bool
    detail: Mapping[str, Any]
    turns: tuple[TurnLine, ...]


class RunFacts:
    """Answers queries about one run, each in bounded time. Raises TooWide, Unavailable, StorageFull, Corrupt.

    `pieces` returns the bytes of a token. It reads the log through a connection of its own, so that serving never waits for the page.

    Args:
        index: the index's path; by default in the directory of the log's folds.
        patience_s: the deadline of one query on the index.
        branches: reads the state of tenants' branches; None: they are left out.
    """

    def __init__(
        self,
        run: Run,
        log: RowLog,
        pieces: Callable[[int], bytes],
        clock: Clock = wall_clock,
        *,
        index: Path | None = None,
        patience_s: float = index_queries.LONGEST_S,
        branches: BranchReader | None = None,
    ) -> None:
        config, home = run.config, run.home
        self._run, self._log, self._pieces, self._clock = run, log, pieces, clock
        self._asked_at = 0.0
        keys = home.log.with_name(home.log.name + "-keys.db")
        words = config.record.encrypt is Encrypt.NONE and not keys.exists()
        self._index = PageIndex(index or home.folds / INDEX, words=words)
        self._questions = index_queries.IndexQueries(self._index.path, longest_s=patience_s)
        self.feed = Feed(log, self._index, lambda: clock() - self._asked_at < WATCHED_S)
        self._threads = index_queries.Threads()
        self._state = RunStateReader(run, log, self._questions, clock, self._threads, branches)
        self._evidence = EvidenceReader(run, log, self._questions, pieces, clock, self._threads)
        self._lines = TrainLines(home.progress("train"), home.progress("serve"))
        self._disk: tuple[float, dict[str, int]] = (0.0, {})

    def close(self) -> None:
        self._threads.close()
        self._index.close()

    async def now(self) -> RunNow:
        """Return the run's state, at most a second old."""
        self._asked_at = self._clock()
        return await self._state.now()

    async def releases(self, before: Cursor | None) -> ReleaseList:
        """Return a page of versions in the ledger, newest first."""
        found = await self._ask(lambda: self._questions.releases(before))
        return replace(found, unread=self.feed.unread_decisions)

    async def release(self, root: str) -> ReleaseDetail | None:
        """Return the version named by "live", "v12" or a hash prefix; None unless the ledger has exactly one such version."""
        found = await self._ask(lambda: self._questions.release(root))
        if found is None:
            return None
        line, events, live, previous = found
        # oldest first by log order, because the clock may have been set back
        rows = {row.id: row for row in await self._find(ReleaseEvent, [(event.id,) for event in reversed(events)])}
        kept = await self._run.store.read_ref(version_ref(line.policy.hash)) is not None
        return ReleaseDetail(
            line=line,
            looks=gate_looks(rows.values()),
            events=tuple((event, carried(rows[event.id]) if event.id in rows else {}) for event in events),
            live=live,
            previous=previous,
            kept=kept,
            awaits=await self._state.awaits(line.policy),
            evidence=await self._evidence.evidence(line.policy, events, rows),
        )

    async def turns(self, query: index_queries.TurnQuery) -> TurnList:
        found = await self._ask(lambda: self._questions.turns(query))
        turns = {turn.id: turn for turn in await self._find(Turn, [(row.id,) for row in found.rows])}
        signal_names = await self._signal_names(turns)
        rows = tuple(_line(row, turns[row.id], signal_names[row.id]) for row in found.rows if row.id in turns)
        return TurnList(rows=rows, page=found, unread=self.feed.unread_turns, searchable=self._index.words)

    async def turn(self, id: str, tenant: str | None) -> TurnDetail | None:
        """Return one turn; None if there is none, or it is another tenant's."""
        row = await self._ask(lambda: self._questions.turn(id, tenant))
        turns = [turn for turn in await self._find(Turn, [(id,)]) if tenant in (None, turn.tenant)]
        if not turns:
            return None
        turn = turns[0]
        row = row or _unread(id)
        signal_names = (await self._signal_names({id: turn}))[id]
        signals = await self._find(Signal, [(turn.tenant, signal) for signal, _ in signal_names])
        rewards = await self._find(Reward, [(id,)])
        decided = [*rewards, *await self._find(Quarantine, [(id,)])]
        step = row.step
        batches = await self._find(Batch, [] if step is None else [(step,)])
        released = None if step is None else await self._ask(lambda: self._questions.shipped_since(step))
        return TurnDetail(
            line=_line(row, turn, signal_names),
            prompt=await self._threads.ask(lambda: tuple(map(self._pieces, turn.prompt_ids))),
            sampled=await self._threads.ask(lambda: tuple(map(self._pieces, turn.sampled_ids))),
            signals=tuple(signals),
            retracted=frozenset(signal.retracts for signal in signals if signal.retracts is not None),
            function=rewards[0].function if rewards else None,
            decided_at=decided[0].at if decided else None,
            advantage=_advantage(batches, id),
            released=released,
            parts=parts_of(turn, rewards[0], signals, self._run.config.reward.options) if rewards else {},
        )

    async def learning(self) -> LearningNow:
        run, marks = await self.now(), await self.shipped()
        lines = await self._threads.ask(self._lines.look)
        return lines.learning(marks, run)

    async def shipped(self, most: int = 200) -> Sequence[LedgerEvent]:
        """Return the newest releases and rollbacks, the last first; none while the index cannot be read."""
        return await self._threads.ask_index(lambda: self._questions.shipped(most), [])

    async def alarms(self, before: Cursor | None) -> index_queries.AlarmList:
        return await self._ask(lambda: self._questions.alarms(before))

    async def alarm(self, name: str) -> AlarmDetail | None:
        """Return one alarm; None if it was never raised."""
        place = await self._ask(lambda: self._questions.alarm(name))
        row = None if place is None else await anext(aiter(self._log.read(place[0] - 1, {Alarm})), None)
        if place is None or row is None or not isinstance(row[1], Alarm) or row[1].name != name:
            return None
        alarm, named = row[1], row[1].detail.get("turns")
        names = [str(turn) for turn in cast("list[object]", named)][-_SHOWN:] if isinstance(named, list) else []
        turns = {turn.id: turn for turn in await self._find(Turn, [(each,) for each in names])}
        signal_names = await self._signal_names(turns)
        rows = {each: await self._ask(lambda each=each: self._questions.turn(each, None)) for each in turns}
        return AlarmDetail(
            line=index_queries.AlarmLine(name=name, reason=alarm.reason, at=alarm.at, standing=place[1]),
            id=alarm.id,
            acceptable=acceptable(name),
            detail=carried(alarm),
            turns=tuple(_line(rows[each] or _unread(each), turn, signal_names[each]) for each, turn in turns.items()),
        )

    async def weights(self) -> WeightsNow:
        home = self._run.home
        lines = await self._threads.ask(self._lines.look)
        if not 0.0 <= self._clock() - self._disk[0] <= _DISK_S:
            held = {"log": home.log, "weights": home.weights, "checkpoints": home.checkpoints}
            sizes = await self._threads.ask(lambda: {name: disk_use(path) for name, path in held.items()})
            self._disk = (self._clock(), sizes)
        refs, released = await self._state.refs(), await self.shipped(20)
        published, swaps = lines.published(), lines.swaps()
        return WeightsNow(
            refs=refs,
            published=published,
            swaps=swaps,
            followers=followers(swaps, refs, published, released, self._clock()),
            disk=self._disk[1],
            free=shutil.disk_usage(home.root).free,
        )

    # ------------------------------------------------------------ queries

    async def _ask(self, question: Callable[[], _T]) -> _T:
        self._asked_at = self._clock()
        return await self._threads.ask(question)

    async def _signal_names(self, turns: Mapping[str, Turn]) -> dict[str, list[tuple[str, str]]]:
        """Return (id, name) of the signals about each turn that its own tenant sent."""
        tenants = {id: turn.tenant for id, turn in turns.items()}
        return await self._ask(lambda: self._questions.signals(tenants))

    async def _find(self, kind: type[R], identities: list[Identity]) -> list[R]:
        return await self._log.find(kind, identities) if identities else []


def _unread(id: str) -> index_queries.IndexedTurn:
    """Return the index row of a turn that is not in the index yet."""
    return index_queries.IndexedTurn(seq=0, id=id, outcome=WAITING, value=None, step=None)


def _line(row: index_queries.IndexedTurn, turn: Turn, signal_names: list[tuple[str, str]]) -> TurnLine:
    """Return a turn with its outcome. `signal_names`: (id, name) of the signals about it."""
    return TurnLine(row=row, turn=turn, signals=tuple(dict.fromkeys(name for _, name in signal_names)))


def _advantage(batches: list[Batch], turn: str) -> float | None:
    for batch in batches:
        for name, credits in zip(batch.turns, batch.credits, strict=True):
            if name == turn and credits:
                return credits[0]
    return None
