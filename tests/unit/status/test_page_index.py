"""The page's index of the log: found by user, arm, version, outcome and word; filled from both ends; made anew when it is wrong."""

import asyncio
import hashlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ostinato.core.errors import Unavailable
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Batch, Holdback, PolicyVersion, Quarantine, ReleaseEvent, Reward
from ostinato.record.log import SqlLog
from ostinato.record.sqlite import driver
from ostinato.release.ledger import State, fold
from ostinato.status import index_queries
from ostinato.status import log_index as feeding
from ostinato.status.index_queries import MOST_COUNTED, PAGE_ROWS, IndexQueries, TooWide, TurnQuery, match_of
from ostinato.status.log_index import Feed, PageIndex
from ostinato.testing.records import a_signal, a_turn


def version(number):
    return PolicyVersion(number=number, hash=f"{number:064x}")


def an_event(number, action, policy, previous, **detail):
    return ReleaseEvent(
        id=f"{number}:{action}",
        action=action,
        policy=policy,
        previous=previous,
        reason="why",
        detail=detail,
        at=float(number),
    )


def a_report(difference, verdict):
    return {
        "difference": difference,
        "lower": difference - 0.02,
        "upper": difference + 0.02,
        "margin": 0.1,
        "verdict": verdict,
    }


class Indexed:
    """A log with its index. `fill` reads until nothing is left."""

    def __init__(self, root, *, words=True):
        self.log = SqlLog.open(root / "log")
        self.index = PageIndex(root / "page.sqlite", words=words)
        self.feed = Feed(self.log, self.index, lambda: True)
        self.ask = IndexQueries(self.index.path, longest_s=5.0)

    async def fill(self, *rows):
        if rows:
            await self.log.append(*rows)
        while await self.feed.step():
            pass

    def ids(self, **query):
        return [row.id for row in self.ask.turns(TurnQuery(**query)).rows]

    def close(self):
        self.index.close()
        self.log.close()


@pytest.fixture
def indexed(tmp_path):
    made = Indexed(tmp_path)
    yield made
    made.close()


async def test_turns_are_found_by_what_they_are_and_by_what_came_of_them(indexed):
    live, control = a_turn("a:0", user="ann", version=3), a_turn("b:0", user="bob", arm=Arm.CONTROL)
    broken, waiting = a_turn("c:0", user="ann"), replace(a_turn("d:0", user="dan"), tenant="acme", text="a red fox")
    await indexed.fill(live, control, broken, waiting, a_signal(live), a_signal(live, "undone"))
    assert indexed.ids() == ["d:0", "c:0", "b:0", "a:0"]
    assert indexed.ids(outcome="waiting") == ["d:0", "c:0", "b:0", "a:0"]
    await indexed.fill(
        Reward(turn="a:0", value=0.5, function="f", signals=(), at=1.0),
        Holdback(turn="b:0", reason="arm:control", at=1.0),
        Quarantine(turn="c:0", reason="reward_failed: ZeroDivisionError", at=1.0),
        Batch(step=7, turns=("a:0",), credits=((0.1, 0.1),), reference=version(0), at=2.0),
    )
    for query, found in (
        ({"user": "ann"}, ["c:0", "a:0"]),
        ({"arm": "control"}, ["b:0"]),
        ({"version": 3}, ["a:0"]),
        ({"outcome": "trained"}, ["a:0"]),
        ({"outcome": "arm:control"}, ["b:0"]),
        ({"outcome": "reward_failed"}, ["c:0"]),
        ({"outcome": "waiting"}, ["d:0"]),
        ({"tenant": "acme"}, ["d:0"]),
        ({"tenant": "acme", "user": "bob"}, []),
        ({"text": "fox"}, ["d:0"]),
        ({"text": "FOX red"}, ["d:0"]),
        ({"text": "red fo"}, []),
        ({"text": 'fox" OR "red'}, []),
        ({"text": "user:fox"}, []),
        ({"text": "NEAR(red fox"}, []),
        ({"text": "*"}, ["d:0", "c:0", "b:0", "a:0"]),
        ({"user": "' OR 1=1 --"}, []),
    ):
        assert indexed.ids(**query) == found, query
    row = indexed.ask.turn("a:0", None)
    assert (row.outcome, row.value, row.step) == ("trained", 0.5, 7)
    assert indexed.ask.turn("d:0", "default") is None
    assert indexed.ask.turn("d:0", "acme") is not None
    assert [name for _, name in indexed.ask.signals({"a:0": "default"})["a:0"]] == ["accepted", "undone"]
    assert indexed.ask.turns(TurnQuery()).outcomes == ("arm:control", "reward_failed", "rewarded", "trained")


async def test_a_tenant_is_not_told_what_became_of_others_turns(indexed):
    acme, bolt = (replace(a_turn(f"{name}:0"), tenant=name) for name in ("acme", "bolt"))
    hold = Holdback(turn="bolt:0", reason="arm:branch", at=1.0)
    await indexed.fill(acme, bolt, Reward(turn="acme:0", value=0.5, function="f", signals=(), at=1.0), hold)
    assert indexed.ask.turns(TurnQuery(tenant="acme")).outcomes == ("rewarded",)
    assert indexed.ask.turns(TurnQuery(tenant="bolt")).outcomes == ("arm:branch",)
    assert indexed.ask.turns(TurnQuery()).outcomes == ("arm:branch", "rewarded")


async def test_a_search_takes_no_longer_for_other_tenants_people_of_the_same_name(indexed, monkeypatch):
    looks = 0

    def clock():
        nonlocal looks
        looks += 1
        return 0.0

    def cost(**query):
        nonlocal looks
        looks = 0
        assert indexed.ids(tenant="acme", user="ann", **query) == ["a:0"]
        return looks

    await indexed.fill(replace(a_turn("a:0", user="ann"), tenant="acme", text="a fox"))
    monkeypatch.setattr(index_queries, "_INSTRUCTIONS", 100)
    monkeypatch.setattr(index_queries, "time", SimpleNamespace(monotonic=clock))
    alone = cost(), cost(text="fox")
    await indexed.fill(*(replace(a_turn(f"b{number}:0", user="ann"), tenant="bolt") for number in range(500)))
    assert all(after <= before + 2 for before, after in zip(alone, (cost(), cost(text="fox")), strict=True))


async def test_signals_of_other_tenants_hide_none_of_a_turns_own(indexed):
    turn = a_turn("a:0")
    foreign = [a_signal(replace(turn, tenant="evil"), id=f"f{number}") for number in range(120)]
    own = [a_signal(turn, id=f"s{number}") for number in range(110)]
    await indexed.fill(turn, *foreign[:60], *own, *foreign[60:])
    assert [id for id, _ in indexed.ask.signals({"a:0": "default"})["a:0"]] == [
        f"s{number}" for number in range(10, 110)
    ]


async def test_pages_meet_in_both_directions(indexed):
    names = [f"t{number:03}:0" for number in range(2 * PAGE_ROWS + 20)]
    await indexed.fill(*(a_turn(name) for name in names))
    first = indexed.ask.turns(TurnQuery())
    second = indexed.ask.turns(TurnQuery(before=first.older))
    third = indexed.ask.turns(TurnQuery(before=second.older))
    pages = [[row.id for row in page.rows] for page in (first, second, third)]
    assert [name for page in pages for name in page] == names[::-1]
    assert (first.newer, third.older, first.count) == (None, None, len(names))
    back = indexed.ask.turns(TurnQuery(after=third.newer))
    assert [row.id for row in back.rows] == pages[1]
    again = indexed.ask.turns(TurnQuery(after=back.newer))
    assert [row.id for row in again.rows] == pages[0]
    assert again.newer is None


async def test_an_old_log_is_read_from_both_ends_and_gives_the_same(tmp_path, monkeypatch):
    rows = []
    for number in range(60):
        turn = a_turn(f"t{number}:0", version=number % 3)
        rows += [turn, a_signal(turn)]
        if number % 4 == 0:
            rows += [Quarantine(turn=turn.id, reason="hung", at=1.0), Holdback(turn=turn.id, reason="aborted", at=1.0)]
        else:
            rows.append(Reward(turn=turn.id, value=1.0, function="f", signals=(), at=1.0))
            rows.append(Batch(step=number + 1, turns=(turn.id,), credits=((1.0, 1.0),), reference=version(0), at=1.0))
    monkeypatch.setattr(feeding, "SLICE", 7)

    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Indexed(tmp_path / "old"), Indexed(tmp_path / "new")
    await old.log.append(*rows)
    await old.feed.step()
    assert old.feed.unread_turns > 0
    await old.fill()
    await new.fill()
    for row in rows:
        await new.fill(row)
    seen = [[(r.id, r.outcome, r.value, r.step) for r in each.ask.turns(TurnQuery()).rows] for each in (old, new)]
    assert seen[0] == seen[1]
    assert {outcome for _, outcome, _, _ in seen[0]} == {"trained", "aborted"}
    assert old.feed.unread_turns == 0
    old.close()
    new.close()


async def test_the_chain_of_releases_is_the_ledgers(indexed):
    v = [version(number) for number in range(5)]
    events = [
        an_event(0, "shipped", v[0], None),
        an_event(1, "evaluated", v[1], v[0], report=a_report(0.03, "EXTEND")),
        an_event(2, "evaluated", v[1], v[0], report=a_report(0.04, "SHIP"), evidence={"raw": [1] * 999}),
        an_event(3, "shipped", v[1], v[0]),
        an_event(4, "shipped", v[2], v[1]),
        an_event(4, "looked", v[2], v[1]),
        an_event(5, "shipped", v[3], v[2]),
        an_event(6, "rolled_back", v[1], v[3]),
        an_event(7, "blocked", v[4], v[1]),
        an_event(8, "shipped", v[0], v[1]),
        an_event(9, "rolled_back", v[1], v[0]),
    ]
    state = State()
    for event in events:
        state = fold(state, event)
        await indexed.fill(event, event)
        found = indexed.ask.releases(None)
        assert (found.live, found.previous) == (state.live, state.previous), event.action
        assert "looked" not in {line.state for line in found.rows}, "a look changes nothing"
    assert found.counts == {"shipped": 5, "looked": 1, "evaluated": 2, "rolled_back": 2, "blocked": 1}
    states = {line.policy.number: line.state for line in found.rows}
    assert states == {0: "rolled_back", 1: "shipped", 2: "rolled_back", 3: "rolled_back", 4: "blocked"}
    line, history, live, _ = indexed.ask.release(v[1].hash)
    assert (line.looks, line.verdict, line.difference, line.live, live) == (2, "SHIP", 0.04, True, v[1])
    assert [event.seq for event in history] == sorted((event.seq for event in history), reverse=True)
    assert indexed.ask.release("live") == indexed.ask.release("v1") == indexed.ask.release(v[1].hash)
    assert indexed.ask.release("v99") is None
    assert indexed.ask.release("0" * 10) is None
    assert indexed.ask.release(v[4].hash[:60]) is None
    assert indexed.ask.shipped_since(2).policy == v[2]
    assert indexed.ask.shipped_since(9) is None


async def test_a_line_that_a_move_of_live_forestalled_changes_no_versions_state(indexed):
    v = [version(number) for number in range(4)]
    await indexed.fill(
        an_event(0, "shipped", v[0], None),
        an_event(1, "evaluated", v[1], v[0], report=a_report(0.04, "SHIP")),
        an_event(2, "evaluated", v[2], v[0], report=a_report(0.04, "SHIP")),
        an_event(3, "shipped", v[3], v[0]),
        an_event(4, "canary", v[1], v[0], share=0.1, salt="s"),
        an_event(5, "awaits_approval", v[2], v[0]),
        an_event(6, "rolled_back", v[0], v[3]),
        an_event(7, "verified", v[3], v[0]),
    )
    states = {line.policy.number: line.state for line in indexed.ask.releases(None).rows}
    assert states == {0: "shipped", 1: "evaluated", 2: "evaluated", 3: "rolled_back"}
    _, history, _, _ = indexed.ask.release(v[1].hash)
    assert [(event.action, event.void) for event in history] == [("canary", True), ("evaluated", False)]
    await indexed.fill(an_event(8, "canary", v[1], v[0], share=0.1, salt="s"))
    assert indexed.ask.release(v[1].hash)[0].state == "canary"


async def test_a_step_that_the_trainer_went_back_behind_is_in_no_later_release(indexed):
    """Policy numbers count steps on when training goes back: v11 is above the abandoned step 8, and was not trained on its turns."""
    v = {number: version(number) for number in (4, 11, 20, 26)}
    shipped = [
        an_event(number, "shipped", v[number], v.get(before))
        for before, number in ((0, 4), (4, 11), (11, 20), (20, 26))
    ]

    def a_batch(step, base=None):
        return Batch(step=step, turns=(), credits=(), reference=v[4], at=float(step), base=base)

    await indexed.fill(*shipped, a_batch(8), a_batch(10, v[4]), a_batch(11), a_batch(21, v[20]), a_batch(25, v[20]))
    found = {step: indexed.ask.shipped_since(step) for step in (3, 8, 9, 10, 11, 12, 21, 23, 25)}
    numbers = {step: None if event is None else event.policy.number for step, event in found.items()}
    assert numbers == {3: 4, 8: None, 9: None, 10: 11, 11: 11, 12: 20, 21: None, 23: None, 25: 26}


async def test_alarms_stand_until_they_are_cleared(indexed):
    def alarm(number, name, state):
        return Alarm(id=str(number), name=name, state=state, reason=f"reason {number}", at=float(number))

    up, down = AlarmState.RAISED, AlarmState.CLEARED
    await indexed.fill(
        alarm(1, "a", up), alarm(2, "b", up), alarm(3, "a", down), alarm(4, "a", up), alarm(5, "b", down)
    )
    found = indexed.ask.alarms(None)
    assert [(each.name, each.reason) for each in found.standing] == [("a", "reason 4")]
    assert [each.reason for each in found.rows] == [f"reason {number}" for number in (5, 4, 3, 2, 1)]


async def test_a_question_that_takes_too_long_is_given_up(indexed):
    await indexed.fill(*(a_turn(f"t{number}:0", arm=Arm.LIVE) for number in range(900)))
    impatient = IndexQueries(indexed.index.path, longest_s=-1.0)
    with pytest.raises(TooWide, match="name a user"):
        impatient.turns(TurnQuery(text="xx", version=9))
    assert impatient.turns(TurnQuery()).count == MOST_COUNTED + 1, "only counting was given up"
    with pytest.raises(Unavailable):
        IndexQueries(indexed.index.path.with_name("none.sqlite")).releases(None)


async def test_counting_stops(indexed, monkeypatch):
    monkeypatch.setattr("ostinato.status.index_queries.MOST_COUNTED", 30)
    await indexed.fill(*(a_turn(f"t{number}:0") for number in range(60)))
    assert indexed.ask.turns(TurnQuery()).count == 31
    assert MOST_COUNTED == 10_000


async def test_without_permission_no_word_is_kept(tmp_path):
    turn = replace(a_turn("a:0"), text="a secret word")
    spoken = Indexed(tmp_path)
    await spoken.fill(turn)
    assert spoken.ids(text="secret") == ["a:0"]
    spoken.close()
    silent = Indexed(tmp_path, words=False)
    await silent.fill(replace(a_turn("b:0"), text="another secret"))
    assert silent.ids(text="secret") == []
    assert silent.ids() == ["b:0", "a:0"]
    silent.close()
    await asyncio.to_thread(lambda: None)
    data = (tmp_path / "page.sqlite").read_bytes()
    assert b"another secret" not in data


def left(root, *words):
    """Which of these words are in the index's files."""
    data = b"".join(path.read_bytes() for path in root.glob("page.sqlite*"))
    return [word for word in words if word.encode() in data]


async def test_no_word_of_what_retention_dropped_stays_in_the_files(tmp_path):
    words = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(3_000)]
    indexed = Indexed(tmp_path)
    for at in range(0, 3_000, 50):
        spoken = [replace(a_turn(f"t{n}:0", user=words[n][::-1]), text=f"one {words[n]}") for n in range(at, at + 50)]
        await indexed.fill(*spoken)
    ends = [word[16:] for word in words]  # FTS5 leaves out what a word shares with the one before it
    assert left(tmp_path, *ends) == ends
    while indexed.index.drop(2_400):
        pass
    assert left(tmp_path, *ends) == ends[2_400:]
    assert left(tmp_path, *(word[::-1] for word in words[:2_400])) == []
    assert indexed.ids(text=words[2_999]) == ["t2999:0"]
    indexed.close()


async def test_a_power_cut_tears_no_transaction_of_the_index(indexed):
    """It may lose the last ones, with the cursors that they wrote; without syncs a name that was taken out could outlive its cursor."""
    normal, wal = 1, "wal"
    assert indexed.index._db.execute("PRAGMA synchronous").fetchone() == (normal,)
    assert indexed.index._db.execute("PRAGMA journal_mode").fetchone() == (wal,)


async def test_a_deletion_that_fails_leaves_the_index_as_it_was_and_usable(indexed):
    await indexed.fill(turn := a_turn("t0:0"), a_signal(turn), a_turn("t1:0"))
    refusing = "CREATE TRIGGER refuse BEFORE DELETE ON signals BEGIN SELECT RAISE(ABORT, 'refused'); END"
    indexed.index._db.execute(refusing)
    with pytest.raises(driver.Error, match="refused"):
        indexed.index.drop(3)
    assert indexed.ids() == ["t1:0", "t0:0"]
    indexed.index._db.execute("DROP TRIGGER refuse")
    await indexed.fill(a_turn("t2:0"))
    assert indexed.ids() == ["t2:0", "t1:0", "t0:0"]
    indexed.index.drop(3)
    assert indexed.ids() == ["t2:0"]


async def test_no_word_stays_in_the_files_once_the_log_is_encrypted(tmp_path):
    spoken = Indexed(tmp_path)
    await spoken.fill(*(replace(a_turn(f"t{n}:0"), text=f"one zebrastripe{n}") for n in range(300)))
    assert left(tmp_path, "zebrastripe")
    spoken.close()
    silent = Indexed(tmp_path, words=False)
    await silent.fill(a_turn("b:0"))
    assert left(tmp_path, "zebrastripe") == []
    silent.close()


@pytest.mark.parametrize("harm", ["garbage", "another version", "another log"])
async def test_an_index_that_is_wrong_is_made_anew(tmp_path, harm):
    first = Indexed(tmp_path)
    await first.fill(*(a_turn(f"t{number}:0") for number in range(5)))
    first.close()
    path = tmp_path / "page.sqlite"
    if harm == "garbage":
        for each in tmp_path.glob("page.sqlite-*"):
            each.unlink()
        path.write_bytes(b"no database at all" * 500)
    elif harm == "another version":
        import pysqlite3

        with pysqlite3.connect(path) as db:
            db.execute("PRAGMA user_version=99")
        db.close()
    else:
        (tmp_path / "log").rename(tmp_path / "old-log")
    second = Indexed(tmp_path)
    if harm == "another log":
        await second.log.append(a_turn("other:0"))
    for _ in range(3):
        try:
            await second.fill()
        except Exception:  # noqa: BLE001 (as the feed does)
            await second.feed._start_over()
            second.feed._cursors = None
    assert second.ids() == (["other:0"] if harm == "another log" else [f"t{number}:0" for number in (4, 3, 2, 1, 0)])
    second.close()


def test_what_is_typed_becomes_words_and_never_an_operator():
    assert match_of("red fox") == '"red" "fox"'
    assert match_of('a"b OR_x') == '"a" "b" "OR" "x"'
    assert match_of(" * - ( ") == ""
