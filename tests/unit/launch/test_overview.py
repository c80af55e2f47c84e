"""What `ostinato status` shows of workers, alarms, answers, learning and disk."""

import io
import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from ostinato.app.numerics import NumericsMode
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.durations import ago
from ostinato.core.records import Arm, PolicyVersion
from ostinato.launch.commands.status import Overview, as_json, overview, show_status
from ostinato.launch.placing.heartbeat import Sign
from ostinato.launch.placing.process import WorkerProcess
from ostinato.launch.placing.supervision import Board, Condition, Watched
from ostinato.launch.views.progress import Progress
from ostinato.launch.views.screen import step_line
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import Proposal, State
from ostinato.release.pace import Cadence, Pace, RolledBack, Spent, Traffic
from ostinato.reward.accounting import Accounting, TenantCoverage
from ostinato.reward.surrogate import SurrogateQuality
from ostinato.status.summary import LedgerLine, RatedTurn, Served, Summary
from ostinato.status.worker_status import WorkerBoard, WorkerStatus, read_board

NOW = 100_000.0
TRAIN = WorkerStatus(
    name="train",
    pid=711,
    condition="running",
    since=NOW - 7_200,
    doing="taking step 12",
    doing_since=NOW - 34,
    trouble="Unavailable: the bucket is away",
    restarts=2,
    reason="was killed by SIGKILL; is memory short?",
    reason_at=NOW - 7_300,
)
BOARD = WorkerBoard(at=NOW - 1, pid=700, ended=None, workers=(TRAIN,))
RUN = Overview(
    directory="runs/mine",
    url="http://127.0.0.1:8321",
    who="arm",
    now=NOW,
    board=BOARD,
    summary=Summary(),
    ledger=State(),
    rules=ReleaseConfig(),
    accounting=Accounting(ingested=0, trained=0, held={}, waiting=0, rewarded=0),
    lines={},
    refs={"live": "ab" * 32},
    disk={"log": 5_000_000, "weights": 2_000_000_000},
    free=70_000_000_000,
)


def drawn(run: Overview) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in overview(run):
        console.print(part, highlight=False)
    return out.getvalue()


def test_a_worker_is_shown_with_what_it_does_its_trouble_and_its_last_end():
    text = drawn(RUN)
    for words in (
        "runs/mine  http://127.0.0.1:8321",
        "train",
        "running",
        "taking step 12; Unavailable: the bucket is away",
        "34 s",
        "was killed by SIGKILL; is memory short? (2 h ago)",
        f"refs/live  {'ab' * 8}",
        "log 5.0 MB, weights 2.0 GB; 70.0 GB free",
    ):
        assert words in text, words


def test_a_worker_that_stays_down_is_shown_with_what_to_do():
    down = replace(TRAIN, condition="failed", reason="BadConfig: reward.function 'mine:reward': no such module")
    text = drawn(replace(RUN, board=replace(BOARD, workers=(down, replace(TRAIN, name="serve")))))
    assert "no such module" in text
    assert "train is not restarted automatically: fix the cause" in text
    assert "start `ostinato train` beside it" in text
    assert "serve is not restarted" not in text


@pytest.mark.parametrize(
    ("board", "told"),
    [
        (None, "no `ostinato up` has run here"),
        (replace(BOARD, ended="stopped"), "`ostinato up` ended 1 s ago\n"),
        (
            replace(BOARD, ended="train cannot run: BadConfig: no"),
            "`ostinato up` ended 1 s ago: train cannot run: BadConfig: no",
        ),
        (replace(BOARD, at=NOW - 300), "`ostinato up` (pid 700) was killed or hangs: no sign of life for 5 min"),
    ],
)
def test_a_supervisor_that_is_gone_is_said_so(board, told):
    text = drawn(replace(RUN, board=board))
    assert told in text
    assert "taking step 12" not in text, "nobody knows what the workers do"


def test_alarms_answers_and_coverage_are_shown():
    seen = Summary(signals=3, alarms={"coverage:acme": ("no feedback for 212 turns", NOW - 60)})
    for number in range(8):
        served = Served(
            arm=("live", "control")[number % 2], person=("acme", f"u{number}"), started_at=NOW - 600, number=number % 2
        )
        seen.rated.append(RatedTurn(served=served, value=1.0 - number % 4, heard=number < 2))
    text = drawn(replace(RUN, summary=seen))
    assert "alarm coverage:acme: no feedback for 212 turns (60 s ago)" in text
    assert "simulated" not in text
    assert "newest 8, oldest 10 min ago" in text
    assert "feedback on 25% of them" in text
    assert "control (frozen)" in text
    assert "simulated users" in drawn(replace(RUN, summary=seen, who="simulated users"))


def test_signals_are_shown_before_any_reward_is_settled():
    assert "no answer has been rated yet\n" in drawn(RUN)
    seen = Summary(signals=3, names=Counter(accepted=2, acepted=1))
    told = "no answer has been rated yet; signals in total: 2 accepted, 1 acepted; a turn's count once its reward is settled"
    assert told in drawn(replace(RUN, summary=seen))


def test_where_turns_and_feedback_stand_is_shown():
    found = Accounting(
        ingested=9,
        trained=4,
        held={"arm:control": 2},
        waiting=3,
        rewarded=6,
        quarantined={"reward_failed": 1},
        oldest_wait=NOW - 42,
        late=5,
        orphans=7,
        coverage={"acme": TenantCoverage(usual=0.62, turns=4_100, alarm=True)},
        surrogate={
            "acme": SurrogateQuality(pairs=500, people=61, correlation=0.84, error=0.05, gap=0.01, gap_error=0.02),
            "new": SurrogateQuality(pairs=9, people=3, correlation=0.5, error=0.4),
        },
    )
    text = drawn(replace(RUN, accounting=found))
    assert "9 turns = 4 trained + 2 held back (2 arm:control) + 3 waiting, the longest for 42 s: balanced" in text
    assert "6 rewards; 1 turns without a reward (1 reward_failed)" in text
    assert "feedback without effect: 5 late" in text
    assert "(7 still waiting for theirs)" in text
    assert "usual feedback of acme: on 62% of turns (4100 turns), SILENT NOW" in text
    acme = "late rewards of 500 turns (61 people) were predicted with correlation 0.84, 95% [0.81, 0.87]; "
    assert f"acme: {acme}predicted minus true, live minus control: +0.010 [-0.029, +0.049]" in text
    assert "new: late rewards of 9 turns (3 people) were predicted with correlation 0.50, no interval yet" in text
    assert "NOT BALANCED" in drawn(replace(RUN, accounting=replace(found, ingested=10)))


@pytest.mark.parametrize(
    ("board", "alive"), [(BOARD, True), (replace(BOARD, at=NOW - 300), False), (replace(BOARD, ended="stopped"), False)]
)
def test_for_scripts_it_is_json(board, alive: bool):
    seen = Summary(signals=3, step=7, tokens=90, alarms={"disk": ("full", NOW - 60)})
    seen.releases.append(LedgerLine(action="shipped", number=6, reason="better", at=NOW - 9))
    for number in range(8):
        served = Served(
            arm=("live", "control")[number % 2], person=("acme", f"u{number}"), started_at=NOW - 600, number=number % 2
        )
        seen.rated.append(RatedTurn(served=served, value=1.0 - number % 4, heard=True))
    coverage = {"acme": TenantCoverage(usual=0.5, turns=40, alarm=False)}
    counts = replace(RUN.accounting, ingested=3, trained=1, held={"arm:eval": 1}, waiting=1, coverage=coverage)
    found = json.loads(json.dumps(as_json(replace(RUN, board=board, summary=seen, accounting=counts))))
    assert found["up"] == {"alive": alive, "pid": 700, "heard_at": board.at, "ended": board.ended}
    assert [(worker["name"], worker["restarts"]) for worker in found["workers"]] == [("train", 2)]
    assert found["alarms"] == {"disk": {"reason": "full", "since": NOW - 60}}
    live = found["arms"]["live"]
    assert (live["turns"], live["acceptance"], live["newest_version"]) == (4, 0.5, 0)
    assert 0 < live["lower"] < 0.5 < live["upper"] < 1
    assert (found["steps"], found["tokens"], found["signals"], found["at"]) == (7, 90, 3, NOW)
    assert found["releases"] == [{"action": "shipped", "number": 6, "reason": "better", "at": NOW - 9, "actor": None}]
    assert (found["turns"]["held"], found["turns"]["balanced"]) == ({"arm:eval": 1}, True)
    assert found["turns"]["coverage"]["acme"]["usual"] == 0.5
    assert found["disk"] == {"log": 5_000_000, "weights": 2_000_000_000, "free": 70_000_000_000}
    assert as_json(replace(RUN, board=None))["up"] is None


def test_learning_and_housekeeping_are_shown():
    step = {"kind": "step", "step": 3, "reward_mean": 0.1, "ess": 0.9, "tokens": 10, "tokens_saved": 2, "seconds": 4}
    lines = {
        "train": [step, {"kind": "refused", "step": 4, "why": "no contrast"}],
        "housekeeping": [
            {"kind": "tidied", "at": NOW - 600, "said": {"weights": "deleted 3 versions"}, "failing": ["logs"]}
        ],
    }
    text = drawn(replace(RUN, lines=lines))
    assert "step   3" in text
    assert "after step 4: refused: no contrast" in text
    assert "housekeeping: 10 min ago, deleted 3 versions; FAILED: logs" in text


def test_the_board_is_written_whole_and_damage_is_no_board(tmp_path):
    watched = Watched(WorkerProcess("train", ("x",), tmp_path / "log"))
    watched.turn(Condition.RUNNING)
    watched.worker.sign = Sign(doing="waiting", for_s=5.0, trouble="t")
    path = tmp_path / "workers.json"
    board, before = Board(path, [watched]), wall_clock()
    board.write()
    shown, after = read_board(path), wall_clock()
    assert (shown.ended, shown.workers[0].doing, shown.workers[0].trouble) == (None, "waiting", "t")
    assert before - 5.1 <= shown.workers[0].doing_since <= after - 4.9
    board.write("stopped")
    assert read_board(path).ended == "stopped"
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        assert read_board(path) is None
    for other in ("[]", "{}", '{"at": 1, "pid": 2, "ended": null, "workers": [{"name": "x"}]}', "null"):
        path.write_text(other)
        assert read_board(path) is None
    assert json.loads(whole)["pid"] > 0
    assert list(tmp_path.glob("*.partial")) == []


def test_a_disk_that_refuses_the_board_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    Board(tmp_path / "file" / "workers.json", []).write()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7_199, "120 min"),
        (7_200, "2 h"),
        (200_000, "2 days"),
    ],
)
def test_spans_for_people(seconds, words):
    assert ago(seconds) == words


V7, V9 = (PolicyVersion(number=number, hash=f"{number:02d}" * 16) for number in (7, 9))
PROPOSED = Proposal(candidate=V9, against=V7, reason="canary +1.2 pp", at=NOW - 600, salt=None, better=False)


def test_what_waits_for_a_person_is_said_with_what_to_type():
    run = replace(RUN, ledger=State(releases=(V7,), proposal=PROPOSED))
    text = drawn(run)
    assert "v9 has passed and waits for approval since 10 min (`ostinato approve` ships it" in text
    assert "canary +1.2 pp" in text
    told = as_json(run)["awaits_approval"]
    assert (told["number"], told["against"], told["since"], told["approved_by"]) == (9, 7, NOW - 600, None)
    approved = replace(run, ledger=State(releases=(V7,), proposal=replace(PROPOSED, actor="ann")))
    assert "ann approved it, and the release worker is about to ship it" in drawn(approved)
    assert "waits for approval" not in drawn(RUN)
    assert as_json(RUN)["awaits_approval"] is None


def test_who_acted_is_shown_with_the_line_and_every_arm_has_a_place():
    """Users who stay behind after a trial are an arm like others."""
    seen = Summary()
    seen.releases.append(LedgerLine(action="rolled_back", number=7, reason="people complain", at=NOW, actor="ann"))
    for arm in Arm:
        served = Served(arm=arm.value, person=("acme", "ann"), started_at=NOW - 60, number=7)
        seen.rated.append(RatedTurn(served=served, value=1.0, heard=True))
    text = drawn(replace(RUN, summary=seen))
    assert "rolled back to v7  by ann: people complain" in text
    assert "previous" in text


SPENT = Spent(trials=12, verdicts=40, false_ships=0.6, false_stops=0.3, stops_allowed=2.0, false_rollbacks=0.24)
TRAFFIC = Traffic(people=1_040, turns=10_300, good=0.61)


def paced(**changes):
    cadence = Cadence(a_week=7.3, trial_s=82_800.0, measured=5, sees=0.018, margin=0.02)
    pace = Pace(traffic=TRAFFIC, cadence=replace(cadence, **changes), spent=SPENT, tried=True)
    return replace(RUN, lines={"release": [{"kind": "pace", "at": NOW} | asdict(pace)]})


def test_a_pause_after_a_rollback_is_shown_until_it_is_over():
    pausing = State(rollbacks=(RolledBack(at=NOW - 3_600, by_itself=True),))
    assert "(release.cooldown_s): 5 h to go" in drawn(replace(RUN, ledger=pausing))
    over = State(rollbacks=(RolledBack(at=NOW - 30_000, by_itself=True),))
    assert "cooldown" not in drawn(replace(RUN, ledger=over))


@pytest.mark.parametrize(("changes", "words"), [
    ({}, "1,040 people with 10,300 rated turns a day carry about 7.3 verified releases a week: the last 5 trials that passed took 23 h"),
    ({"measured": 0}, "a trial takes about 23 h to rule out a loss of 2.0 pp; candidates beyond that are skipped"),
    ({"trial_s": None, "sees": 0.041}, "are too few for trials: in 4 days they rule out no loss below 4.1 pp"),
])  # fmt: skip
def test_how_many_releases_the_traffic_carries_is_said(changes, words):
    run = paced(**changes)
    text = " ".join(drawn(run).split())
    assert words in text
    assert "of 12 trials in 4 weeks at most 0.60 are expected to have shipped a loss" in text
    assert "allows 2 at release.trial.trials_a_week" in text
    assert "at most 0.24 are expected to have been rolled back in 4 weeks" in text
    assert json.loads(json.dumps(as_json(run)))["pace"]["cadence"]["a_week"] == 7.3
    assert as_json(RUN)["pace"] is None


def test_without_trials_it_is_said_that_the_suite_alone_decides():
    run = paced()
    run.lines["release"][0]["tried"] = False
    text = " ".join(drawn(run).split())
    assert "trials are off (release.canary), so the suite alone decides" in text
    assert "of 40 verdicts of the gate in 4 weeks" in text


def test_a_steps_line_names_the_divergence_that_was_measured_and_none_that_was_not():
    step = {"step": 3, "reward_mean": 0.1, "ess": 0.97, "tokens": 3400.0, "tokens_saved": 1200.0, "seconds": 24.0}
    assert "KL" not in step_line(step)
    assert "KL from the anchor +0.0310  ESS" in step_line(step | {"anchor_kl": 0.031})
    assert "  KL +0.0020  ESS" in step_line(step | {"anchor_kl": 0.031, "kl_k1": 0.002})


async def test_numerics_that_are_not_exact_are_told_however_much_was_written_since(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    with open_run(config) as run:
        progress, fast = (
            Progress(run.home.progress("serve")),
            NumericsMode(mode="fast", why="linear 8 -> 8 gives other bits"),
        )
        progress.computing(fast)
        for number in range(2_000):
            progress.write("swapped", slot="canary", number=number, hash="0" * 64)
    out = io.StringIO()
    await show_status(config, Console(file=out, width=300))
    assert str(fast) in out.getvalue()


def test_words_of_others_are_text_on_the_screen():
    alarms = {"reward_function": ("a:0: reward_failed: no [/b] number in \x1b[2J", NOW - 60)}
    text = drawn(replace(RUN, refs={"a[/b]\x1b[2J": "cd" * 32}, summary=Summary(alarms=alarms)))
    assert "\x1b" not in text
    assert "refs/a[/b]\\x1b[2J" in text
    assert "no [/b] number in \\x1b[2J" in text
