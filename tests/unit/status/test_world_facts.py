"""What the page is told of simulated worlds: files that grow, are set aside, written anew or hold nonsense; and what is counted."""

import asyncio
import json
from dataclasses import replace

import pytest
from tests.fakes.worlds_page import (
    ANSWER,
    SECRET,
    a_task,
    finished,
    journal,
    pieces,
    steps,
    weights,
    worlds_of,
    write_lines,
    write_run,
)

from ostinato.app.storage import Home
from ostinato.core.files import older
from ostinato.launch.views.progress import Progress
from ostinato.status.progress_lines import LONGEST_LINE, FileTail, Spot
from ostinato.status.releases import LedgerEvent
from ostinato.status.worlds.run_worlds import RolloutQuery, changes_of, figures_of, turns_of, why_of
from ostinato.status.worlds.tasks import counts_of, group_counts, solved_share, version_points
from ostinato.status.worlds.transcript import LONGEST_PART, LONGEST_STEP, part_of, steps_of
from ostinato.status.worlds.underway import EndedRollouts, record_of
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.worlds.rollout.groups import EventFile, Groups

SPOT = Spot(b"", 0)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "run")


def ended(*records):
    fold = EndedRollouts()
    fold.take((SPOT, json.dumps(each).encode()) for each in records)
    return fold


def lines_of(*records):
    return [each.line for each in ended(*records).all()]


# ---------------------------------------------------------------- files


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path):
    path = tmp_path / "f.jsonl"
    growing = FileTail([path])
    assert list(growing.new()) == []
    path.write_bytes(b"one\ntw")
    assert [line for _, line in growing.new()] == [b"one"]
    assert growing.behind == 2
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    found = list(growing.new())
    assert [line for _, line in found] == [b"two", b"three"]
    assert [growing.line(spot) for spot, _ in found] == [b"two", b"three"]
    assert (list(growing.new()), growing.behind) == ([], 0)


def test_a_file_that_was_set_aside_is_read_to_its_end_and_its_lines_are_found_again(tmp_path):
    path = tmp_path / "f.jsonl"
    growing, progress = FileTail([older(path), path]), Progress(path, most_bytes=100)
    progress.write("a", n=0)
    spots = {json.loads(line)["n"]: spot for spot, line in growing.new()}
    for n in range(1, 9):
        progress.write("a", n=n)
        if n % 3 == 0:
            spots |= {json.loads(line)["n"]: spot for spot, line in growing.new()}
    spots |= {json.loads(line)["n"]: spot for spot, line in growing.new()}
    assert older(path).exists()
    assert sorted(spots) == list(range(9))
    held = {json.loads(growing.line(spot) or b"{}").get("n") for spot in spots.values()} - {None}
    assert held >= {6, 7, 8}, "what is still on disk is found by its place"
    assert growing.line(spots[0]) is None, "what is gone is gone"


def test_a_file_that_was_written_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    growing = FileTail([path])
    list(growing.new())
    path.write_bytes(b"two\nthree\nfour\n")
    assert [line for _, line in growing.new()] == [b"two", b"three", b"four"]


def test_of_a_large_file_the_end_is_read_and_what_is_passed_over_is_said(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"".join(b"%06d\n" % n for n in range(1000)))
    growing = FileTail([path], most_bytes=70)
    assert [line for _, line in growing.new()] == [b"%06d" % n for n in range(991, 1000)]
    assert growing.skipped == 991 * 7


def test_a_look_ends_in_time_and_the_next_one_goes_on(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes((b"x" * 99 + b"\n") * 30_000)
    ticks = iter(range(10_000))
    growing = FileTail([path], look_s=2.0, clock=lambda: float(next(ticks)))
    first = len(list(growing.new()))
    assert 0 < first < 30_000
    assert growing.behind == 100 * (30_000 - first)
    total = first
    while growing.behind:
        total += len(list(growing.new()))
    assert total == 30_000


def test_a_line_without_end_is_passed_over_once_it_ends(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"one\n" + b"x" * (3 << 20))
    growing = FileTail([path])
    assert [line for _, line in growing.new()] == [b"one"]
    with path.open("ab") as file:
        file.write(b"\n" + b"y" * (LONGEST_LINE + 1) + b"\nlast\n")
    assert [line for _, line in growing.new()] == [b"last"]
    assert growing.bad == 2


# ---------------------------------------------------------------- the fold


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[1]",
        b"null",
        b"[" * 100_000,
        json.dumps(finished(episode="") | {"episode": ""}).encode(),
        json.dumps(finished() | {"episode": 7}).encode(),
        json.dumps(finished() | {"task": None}).encode(),
        json.dumps(finished() | {"at": "now"}).encode(),
        json.dumps(finished() | {"at": float("nan")}).encode(),
        json.dumps(finished() | {"at": 10**400}).encode(),
        json.dumps(finished() | {"at": 1e12}).encode(),
        json.dumps(finished() | {"value": 1.5}).encode(),
        json.dumps(finished() | {"ended": "somehow"}).encode(),
        json.dumps(finished() | {"cheated": "yes"}).encode(),
        b"\xff\xfe",
        json.dumps(finished() | {"value": -1}).encode(),
    ],
)
def test_what_is_no_record_is_counted_and_nothing_else(line):
    fold = EndedRollouts()
    fold.take([(SPOT, line), (SPOT, json.dumps(finished("w3f.1.0.0")).encode())])
    assert (fold.bad, len(fold)) == (1, 1)


def test_numbers_that_no_run_has_are_left_out_and_names_are_cut():
    lie = {"policy": {"number": -3, "hash": "00"}, "policy_last": {"number": 10**40, "hash": "00"}, "member": -1}
    (line,) = lines_of(finished() | lie)
    assert (line.policy, line.policy_last, line.member) == (None, None, None)
    (line,) = lines_of(finished() | {"cheated": ["x" * 9999] * 99, "task": "t" * 9999})
    assert (len(line.cheated), len(line.cheated[0]), len(line.task)) == (20, 512, 512)


def test_a_rollout_that_is_told_twice_counts_once_as_it_was_told_last():
    fold = ended(finished(value=0.0), finished("w3f.0.1.0"), finished(value=1.0))
    assert [(line.episode, line.value) for line in fold.newest()] == [("w3f.0.0.0", 1.0), ("w3f.0.1.0", 1.0)]
    assert [line.member for line in fold.of_group("w3f.0")] == [0, 1]


def test_the_oldest_are_let_go_and_counted():
    fold = EndedRollouts(most=3)
    fold.take((SPOT, json.dumps(finished(f"w3f.{n}.0.0")).encode()) for n in range(5))
    assert [line.episode for line in fold.newest()] == ["w3f.4.0.0", "w3f.3.0.0", "w3f.2.0.0"]
    assert (fold.dropped, fold.of_group("w3f.0"), fold.get("w3f.0.0.0")) == (2, [], None)


# ---------------------------------------------------------------- counting


def test_a_share_has_an_interval_with_tasks_as_clusters():
    alike = lines_of(*(finished(f"w3f.{n}.0.0", task=f"t{n % 2}", value=float(n % 2)) for n in range(100)))
    apart = lines_of(*(finished(f"w3f.{n}.0.0", task=f"t{n}", value=float(n % 2)) for n in range(100)))
    wide, narrow = solved_share(counts_of(alike)), solved_share(counts_of(apart))
    assert (wide.share, narrow.share, wide.tasks, narrow.tasks) == (0.5, 0.5, 2, 100)
    assert narrow.upper - narrow.lower < 0.25 < 0.8 < wide.upper - wide.lower, "two tasks tell little, however often"
    one = solved_share(counts_of(alike[:1]))
    assert (one.lower, one.upper) == (0.0, 1.0)
    assert solved_share({}) is None
    known = solved_share(counts_of(alike[::2]), one_task=True)
    assert (known.share, known.upper < 0.1) == (0.0, True)


def test_who_cheated_has_not_solved_and_who_was_not_graded_is_not_counted():
    lines = lines_of(
        finished("a.0.0.0", cheated=["changed a test"]), finished("a.0.1.0", value=None), finished("a.0.2.0")
    )
    share = solved_share(counts_of(lines))
    assert (share.share, share.rollouts) == (0.5, 2)


def test_versions_that_are_too_many_for_a_picture_are_put_together():
    lines = lines_of(*(finished(f"a.{n}.0.0", number=n, value=float(n >= 50)) for n in range(100)))
    points = version_points(lines, most=10)
    assert [(point.first, point.last) for point in points] == [(n, n + 9) for n in range(0, 100, 10)]
    assert [point.solved.share for point in points] == [0.0] * 5 + [1.0] * 5
    assert [point.first for point in version_points(lines[:3])] == [0, 1, 2]


def test_groups_without_contrast_are_those_whose_grades_are_all_alike():
    values = {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (0.0, 1.0), "d": (0.5, 0.5), "e": (1.0,), "f": (None, 1.0)}
    found = group_counts(
        lines_of(
            *(finished(f"{name}.{n}.0", group=name, value=v) for name in values for n, v in enumerate(values[name]))
        )
    )
    assert (found.graded, found.flat, found.all_solved, found.none_solved) == (4, 3, 1, 1)


# ---------------------------------------------------------------- one rollout


def test_steps_show_what_is_new_to_the_model_and_what_it_called():
    first, second = steps()
    found = steps_of([first.id, second.id], [first, second], 0, None, pieces, ByteRenderer().reader, tools=True)
    assert [(part.role, part.text) for part in found[0].given] == [("user", "Mend calc.py: add must add.")]
    assert [(call.name, json.loads(call.arguments)) for call in found[0].calls] == [("read", {"path": "calc.py"})]
    assert found[0].answer is None
    assert [part.role for part in found[1].given] == ["tool"], "what was there before is not shown again"
    assert "return a - b" in found[1].given[0].text
    assert found[1].answer.text == "Done: it adds."
    assert [step.versions for step in found] == [(weights(4),), (weights(5),)]
    assert found[1].new == len(second.prompt_ids) - len(first.prompt_ids) - len(first.sampled_ids)
    plain = steps_of([first.id], [first], 0, None, pieces, None, tools=True)
    assert "<tool_call>" in plain[0].answer.text


def test_a_step_says_what_is_missing_forgotten_or_given_otherwise():
    first, second = steps()
    gone = replace(first, sampled_ids=(), prompt_ids=(), logprobs=(), text="")
    other = replace(second, prompt_ids=tuple(b"user\nsomething else"))
    found = steps_of(["a", "b", "c"], [None, gone, other], 3, None, pieces, ByteRenderer().reader, tools=True)
    assert (found[0].missing, found[0].at, found[0].given) == (True, 3, ())
    assert (found[1].redacted, found[1].given, found[1].answer) == (True, (), None)
    again = steps_of(["c"], [other], 1, first, pieces, ByteRenderer().reader, tools=True)
    assert again[0].rewritten
    assert again[0].given[0].text == "something else"


def test_long_texts_are_cut_in_their_middle_and_say_so():
    part = part_of("user", "a" * LONGEST_PART + "b" * 10)
    assert (part.cut, part.text[:3], part.text[-10:]) == (10, "aaa", "b" * 10)
    assert "10 characters are not shown" in part.text
    first, _ = steps()
    many = replace(first, prompt_ids=tuple(b"user\n" + b"x" * 50_000))
    (step,) = steps_of(["a"], [many], 0, None, pieces, None, tools=False)
    assert sum(len(part.text) for part in step.given) < 2 * LONGEST_PART
    noisy = replace(first, prompt_ids=tuple(b"tool\nx\x00" * 500))
    (step,) = steps_of(["a"], [noisy], 0, None, pieces, None, tools=False)
    assert len(step.given) < 70
    long = replace(first, prompt_ids=tuple((b"tool\n" + b"y" * 1_000 + b"\x00") * 40))
    (step,) = steps_of(["a"], [long], 0, None, pieces, None, tools=False)
    assert sum(len(part.text) for part in step.given) < LONGEST_STEP + LONGEST_PART
    calls = b'<tool_call>\n{"name": "write", "arguments": {"text": "%s"}}\n</tool_call>' % (b"z" * 3_000)
    busy = replace(first, sampled_ids=tuple(calls * 10))
    (step,) = steps_of(["a"], [busy], 0, None, pieces, ByteRenderer().reader, tools=True)
    assert len(step.calls) == 10
    assert sum(len(call.arguments) for call in step.calls) < LONGEST_STEP + 10 * 60


def test_a_page_of_steps_ends_where_it_is_full_and_the_next_one_goes_on():
    first, _ = steps()
    turn = replace(first, prompt_ids=tuple(b"tool\n" + b"x" * 7_000), sampled_ids=tuple(b"y" * 7_000))
    many = [replace(turn, prompt_ids=(n, *turn.prompt_ids)) for n in range(1, 21)]
    found = steps_of([str(n) for n in range(20)], many, 0, None, pieces, None, tools=False)
    assert 7 <= len(found) <= 9
    again = steps_of(["a"] * 12, many[8:], 8, many[7], pieces, None, tools=False)
    assert again[0].at == 8


def test_what_is_shown_of_a_record_is_bounded_whatever_it_holds():
    assert turns_of(["a", 7, "x" * 1000, "b"]) == ["a", "b"]
    assert len(figures_of({str(n): 1.0 for n in range(1000)})) == 60
    many = [{"path": f"{n}", "kind": "written", "diff": "+" * 30_000} for n in range(100)]
    record = record_of(json.dumps(finished(changes=many, why="w" * 100_000)).encode())
    changes, more = changes_of(record)
    assert sum(len(change.diff) for change in changes) == 40_000
    assert (len(changes), more, changes[1].cut, changes[9].cut) == (60, 40, 20_000, 30_000)
    assert len(why_of(record)) < 5_000
    binary = record_of(json.dumps(finished(changes=[{"path": "a", "kind": "written", "diff": None}])).encode())
    assert changes_of(binary)[0][0].diff is None


# ---------------------------------------------------------------- the whole


async def test_the_facts_of_a_run_are_its_files(home):
    members = (
        finished(),
        finished("w3f.0.1.0", value=0.0),
        finished("w3f.m0.0", group=None, split="held_out", task="held-1"),
    )
    log = MemoryLog()
    await log.append(*steps())
    facts = worlds_of(home, write_run(home, rollouts=members), log)
    now = await facts.worlds("")
    kinds = {(each.family, each.split): each for each in now.families}
    assert set(kinds) == {("repair", "train"), ("names", "train"), ("repair", "held_out")}
    repair = kinds["repair", "train"]
    assert (repair.tasks, repair.drawn, repair.harness, repair.grader) == (2, 2, "tools", "pytest")
    assert (repair.solved.rollouts, repair.solved.share, repair.version) == (2, 0.5, 4)
    assert kinds["names", "train"].solved is None
    assert [(curve.name, curve.points[0].first) for curve in now.counts.curves] == [("held out", 4), ("train", 4)]
    assert (now.pacing.drawn, now.pacing.spent, now.pacing.open, now.pacing.told) == (2, 0, 2, 1)
    assert [(group.name, group.told) for group in now.under_way] == [("w3f.1", False), ("w3f.0", True)]
    states = [(line.ended, line.value) for line in now.under_way[0].members]
    assert states == [("graded", 1.0), ("failed", None), ("under way", None), ("waiting", None)]
    assert [line.ended for line in now.under_way[1].members] == ["submitted", "submitted"], "the record says more"
    assert [(each.current, each.tasks, each.rollouts) for each in now.tasksets] == [(True, 4, 0), (False, None, 3)]
    detail = await facts.rollout("w3f.0.0.0", 0)
    assert [line.episode for line in detail.members] == ["w3f.0.0.0", "w3f.0.1.0"]
    assert (detail.turns, len(detail.steps), detail.why) == (2, 2, "1 of 1 and 3 of 3 tests pass")
    assert detail.changes[0].diff.startswith("--- calc.py")
    assert (await facts.rollout("w3f.0.0.0", 1)).steps[0].at == 1
    assert await facts.rollout("none", 0) is None
    waiting = await facts.rollout("w3f.1.2.0", 0)
    assert (waiting.line.ended, waiting.on_record, len(waiting.members)) == ("under way", False, 4)
    facts.close()


async def test_cheats_are_counted_by_rollout_and_by_what_was_tried(home):
    rows = [
        finished(),
        finished("w3f.0.1.0", value=0.0, cheated=["changed a test", "a nonce"]),
        finished("w3f.0.2.0", value=0.0, cheated=["changed a test"], ended="timeout"),
    ]
    facts = worlds_of(home, write_run(home, rollouts=rows))
    now = await facts.worlds("")
    assert (now.counts.cheated, now.counts.ended) == (2, {"submitted": 2, "timeout": 1})
    assert now.counts.cheats == (("changed a test", 2, "w3f.0.2.0"), ("a nonce", 1, "w3f.0.1.0"))
    assert (await facts.rollouts(RolloutQuery(outcome="cheated"))).count == 2
    facts.close()


async def test_releases_are_marked_beside_success(home):
    async def shipped():
        events = [("shipped", 4), ("rolled_back", 3), ("shipped", 3)]
        return [LedgerEvent(seq=n, id=str(n), action=action, policy=weights(number), previous=None, reason="", at=1.0)
                for n, (action, number) in enumerate(events)]  # fmt: skip

    facts = worlds_of(home, write_run(home, rollouts=[finished(number=3), finished("w3f.0.1.0")]), shipped=shipped)
    assert (await facts.worlds("")).marks == ((3, "v3"), (4, "v4"))
    assert [point.first for point in (await facts.worlds("")).counts.curves[0].points] == [3, 4]
    assert (await facts.worlds("none")).counts.curves == ()
    facts.close()


async def test_a_rollout_that_was_begun_anew_is_known_by_its_group_and_number(home):
    again = finished("w3f.1.0.0.1", group="w3f.1", member=0, task="calc-2", why="after the gateway was away")
    facts = worlds_of(home, write_run(home, rollouts=[again]))
    now = await facts.worlds("")
    assert now.under_way[0].members[0].episode == "w3f.1.0.0.1"
    detail = await facts.rollout("w3f.1.0.0.1", 0)
    assert [line.episode for line in detail.members][:2] == ["w3f.1.0.0.1", "w3f.1.1.0"]
    facts.close()


async def test_what_is_hidden_is_given_to_who_asks_for_it_only(home):
    facts = worlds_of(home, write_run(home))
    seen, whole = await facts.task("calc-1", hidden=False), await facts.task("calc-1", hidden=True)
    assert (seen.facts.hidden, seen.facts.hidden_files, seen.facts.hidden_facts) == (None, 1, 2)
    assert SECRET not in repr(seen)
    assert ANSWER not in repr(seen)
    assert whole.facts.hidden.files[0][1].text == SECRET
    assert ANSWER in repr(whole.facts.hidden.data)
    assert seen.facts.files == ("README.md", "calc.py")
    assert await facts.task("none", hidden=True) is None
    facts.close()


async def test_a_second_look_reads_only_what_is_new_and_many_ask_at_once(home):
    facts = worlds_of(home, write_run(home, rollouts=[finished()]))
    await facts.worlds("")
    write_lines(home.root / "finished.jsonl", [finished("w3f.5.0.0", value=0.0)])
    write_lines(home.rollouts, [{"kind": "spent", "n": 0, "after": 3}])
    many = await asyncio.gather(*(facts.worlds("") for _ in range(8)))
    assert {now.reading.kept for now in many} == {2}
    assert (many[0].pacing.spent, [group.name for group in many[0].under_way]) == (1, ["w3f.1"])
    facts.close()


async def test_files_that_are_nonsense_or_gone_leave_a_page_that_says_so(home):
    path = write_run(home, rollouts=[finished()])
    home.rollouts.write_bytes(b'{"kind": "drawn"}\n[]\n{"kind": "ended", "n": [], "member": 1}\n\xff\xfe\n')
    path.write_text('{"id": "broken"}\n')
    facts = worlds_of(home, path)
    now = await facts.worlds("")
    assert (now.reading.bad, now.reading.kept, now.under_way) == (4, 1, ())
    assert "tasks.jsonl, line 1" in now.reading.tasks
    assert (await facts.task("calc-1", hidden=True)).facts is None, "a rollout still names it"
    path.unlink()
    assert "cannot be read" in (await facts.worlds("")).reading.tasks
    facts.close()


async def test_a_taskset_that_was_written_anew_is_read_anew(home):
    path = write_run(home)
    facts = worlds_of(home, path)
    assert await facts.task("calc-9", hidden=False) is None
    write_run(Home(home.root / "other"), tasks=[a_task("calc-9")]).replace(path)
    assert (await facts.task("calc-9", hidden=False)).facts.id == "calc-9"
    assert await facts.task("calc-2", hidden=False) is not None, "the journal drew it"
    assert await facts.task("names-1", hidden=False) is None
    facts.close()


async def test_a_journal_that_was_begun_anew_forgets_the_groups_of_the_old_one(home):
    facts = worlds_of(home, write_run(home))
    assert (await facts.worlds("")).pacing.drawn == 2
    write_lines(home.rollouts, [{"kind": "opened", "token": "w99"}, *journal()[1:2]], mode="w")
    now = await facts.worlds("")
    assert (now.pacing.drawn, now.under_way[0].name) == (1, "w99.0")
    facts.close()


@pytest.mark.parametrize("half", [False, True])
async def test_a_journal_that_was_written_anew_shows_the_same(half, home):
    """Also while the page has read only a part of the new one."""
    facts = worlds_of(home, write_run(home))
    write_lines(home.rollouts, [{"kind": "spent", "n": 0, "after": 3}])
    first = await facts.worlds("")
    kept, events = EventFile.open(home.rollouts)
    groups = Groups([], token="w3f", epochs=0)
    for event in events:
        groups.apply(event)
    kept.rewrite(groups.events())
    kept.close()
    whole = home.rollouts.read_bytes()
    if half:
        home.rollouts.write_bytes(whole[: whole.rindex(b'{"kind":"known"')])
        now = await facts.worlds("")
        assert (now.under_way, now.pacing.drawn, now.pacing.spent) == (first.under_way, 2, 1)
        home.rollouts.write_bytes(whole)
    for facts_ in (facts, worlds_of(home, home.root / "tasks.jsonl")):
        now = await facts_.worlds("")
        assert (now.under_way, now.reading.bad) == (first.under_way, 0)
        assert (now.pacing.drawn, now.pacing.spent, now.pacing.open) == (2, 1, 1)
        assert [line.drawn for line in now.families] == [line.drawn for line in first.families]
        assert (await facts_.task("calc-1", hidden=False)).id == "calc-1"
    write_lines(home.rollouts, [{"kind": "begun", "n": 1, "member": 3, "episode": "w3f.1.3.0"}])
    (group,) = (await facts.worlds("")).under_way
    assert group.members[3].ended == "under way"
    facts.close()
    facts_.close()


async def test_rollouts_are_listed_a_page_at_a_time(home):
    rows = [
        finished(f"w3f.{n}.0.0", value=float(n % 2), task=f"calc-{n % 3}", ended="timeout" if n == 7 else "submitted")
        for n in range(120)
    ]
    facts = worlds_of(home, write_run(home, rollouts=rows))
    first = await facts.rollouts(RolloutQuery())
    assert (first.count, len(first.rows), first.rows[0].episode) == (120, 50, "w3f.119.0.0")
    second = await facts.rollouts(RolloutQuery(before=first.older))
    third = await facts.rollouts(RolloutQuery(before=second.older))
    assert [line.episode for line in (*first.rows, *second.rows, *third.rows)] == [
        f"w3f.{n}.0.0" for n in range(119, -1, -1)
    ]
    assert third.older is None
    assert (await facts.rollouts(RolloutQuery(outcome="solved"))).count == 60
    assert (await facts.rollouts(RolloutQuery(outcome="failed", task="calc-0"))).count == 20
    assert [line.episode for line in (await facts.rollouts(RolloutQuery(ended="timeout"))).rows] == ["w3f.7.0.0"]
    facts.close()
