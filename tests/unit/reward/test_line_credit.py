"""Credit line by line: each line's tokens get what became of it, and no way of cutting an edit into pieces pays more than another."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ostinato.core.errors import NoSignal
from ostinato.core.line_survival import line_spans
from ostinato.core.records import Batch, LineSurvival, LineValues, ParsedCall, PolicyVersion, Reward, Signal, Source
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode, episode_returns, returns
from ostinato.reward.functions import agent, copilot
from ostinato.reward.line_credit import LINE_DISCOUNT, discounted, turn_lines
from ostinato.reward.protocol import Failure, RewardRequest, checked
from ostinato.testing.records import a_delivery, a_turn

V0 = PolicyVersion(number=0, hash="0" * 64)
WINDOW = {"window": 30.0}


class Nothing(Baseline):
    """Expects nothing."""

    def predict(self, context):
        return 0.0


def token_bytes(token):
    return bytes([token])


def line_returns(turns, rewards, discount):
    """The return of each turn, and what lines account for."""
    return [(each.total, each.lines) for each in episode_returns(turns, rewards, discount).turns]


def a_call(id, lines, *, episode=None, at=10.0):
    """A turn whose only call writes so many lines; a token is a byte."""
    text = "".join(f"line {n} of it\n" for n in range(lines))
    said = f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'path': 'a.py', 'content': text}})}\n</tool_call>"
    turn = replace(
        a_turn(id, sampled=tuple(said.encode()), ended_at=at, prompt=(1, len(id))),
        text=said,
        calls=(ParsedCall(name="write", start=0, end=len(said)),),
    )
    return turn if episode is None else replace(turn, episode=episode)


def looked(turn, lines, kept, *, followed=None, name="lines_kept_5m", at=20.0, call=0, argument="content"):
    """What the watcher says about a call."""
    followed = followed or range(1, lines + 1)
    ranges = [tuple((n, n) for n in numbers) for numbers in (followed, kept)]
    survival = LineSurvival(call=call, argument=argument, lines=lines, followed=ranges[0], kept=ranges[1])
    return Signal(
        id=f"{name}-{turn.id}-{call}",
        turn=turn.id,
        name=name,
        value=len(kept) / len(followed),
        source=Source.CODE,
        occurred_at=at,
        received_at=at,
        lines=(survival,),
    )


def credited(turns, signals, *, discount=0.9, baseline=None, lines=True):
    """Each turn's advantages, with what `agent` makes of the signals."""
    said = {turn.id: [signal for signal in signals if signal.turn == turn.id] for turn in turns}
    rewards = {turn.id: agent(turn, said[turn.id], turn.ended_at + 30.0, **WINDOW) for turn in turns}
    told = {turn.id: turn_lines(turn, rewards[turn.id], token_bytes) for turn in turns} if lines else {}
    config = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0, discount=discount)
    credit = SingleRollout(config, baseline or Nothing(), lines=told)
    return credit(by_episode(turns), {id: reward.value for id, reward in rewards.items()})


def of_line(turn, advantages, line, lines):
    start, end = line_spans(turn, 0, "content", lines)[line - 1]
    values = set(advantages[start:end])
    assert len(values) == 1, "one credit for all tokens of a line"
    return values.pop()


def outside(turn, advantages, lines):
    """The credit of the tokens outside of the text."""
    first, last = line_spans(turn, 0, "content", lines)[0][0], line_spans(turn, 0, "content", lines)[-1][1]
    values = {*advantages[:first], *advantages[last:]}
    assert len(values) == 1
    return values.pop()


async def test_a_removed_line_is_blamed_while_its_answer_is_praised(log, now, open_desk):
    turns = [a_call("a:0", 6), a_call("b:0", 3)]
    await log.append(*turns, a_delivery(*turns))
    await log.append(looked(turns[0], 6, [1, 2, 4, 5, 6]), looked(turns[1], 3, []))
    desk = open_desk(
        log, lambda turn, said, at: agent(turn, said, at, **WINDOW), RewardConfig(user_cap=1.0), token_bytes=token_bytes
    )
    now.at = 50.0
    await desk.poll()
    rewards = {reward.turn: reward for reward in log.of(Reward)}
    assert rewards["a:0"].value == pytest.approx(5 / 6 - 0.5)
    runs = tuple((line, line, -0.5 if line == 3 else 0.5) for line in range(1, 7))
    assert rewards["a:0"].lines == (LineValues(call=0, argument="content", lines=6, runs=runs),)
    made = await desk.batch(step=1, size=2, reference=V0)
    assert made is not None
    kept, lost = (sample.advantages for sample in made.samples)
    assert outside(turns[0], kept, 6) > 0
    assert np.mean(kept) > 0
    by_line = [of_line(turns[0], kept, line, 6) for line in range(1, 7)]
    assert by_line[2] < 0
    assert min(by_line[:2] + by_line[3:]) > 0
    assert by_line[1] < by_line[0] < by_line[3] == by_line[5], "a line is blamed a little for the next ones"
    assert max(lost) < 0
    (row,) = log.of(Batch)
    assert row.credits == (kept, lost), "the step can be repeated from the log"


async def test_without_the_tokens_texts_a_turn_is_credited_as_a_whole(log, now, open_desk):
    turns = [a_call("a:0", 6), a_call("b:0", 3)]
    await log.append(*turns, a_delivery(*turns), looked(turns[0], 6, [1, 2]), looked(turns[1], 3, [2, 3]))
    desk = open_desk(log, lambda turn, said, at: agent(turn, said, at, **WINDOW), RewardConfig(user_cap=1.0))
    now.at = 50.0
    await desk.poll()
    made = await desk.batch(step=1, size=2, reference=V0)
    assert made is not None
    assert [len(set(sample.advantages)) for sample in made.samples] == [1, 1]


@pytest.mark.parametrize("kept", [[], [1, 2, 3, 4]])
def test_where_all_lines_fare_alike_the_credit_is_that_of_the_whole(kept):
    turns = [a_call("a:0", 4), a_call("b:0", 4)]
    signals = [looked(turns[0], 4, kept), looked(turns[1], 4, [1, 2, 3, 4])]
    signals.append(replace(signals[0], id="t", name="tests_failed", lines=()))
    whole = credited(turns, signals, lines=False)
    by_line = credited(turns, signals)
    for turn in turns:
        assert by_line[turn.id] == pytest.approx(whole[turn.id])


def test_without_line_numbers_nothing_changes_to_the_last_bit():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rewards = rng.normal(size=int(rng.integers(1, 9))).tolist()
        discount = float(rng.uniform())
        ids = [
            f"{i // 2 if rng.random() < 0.3 else i}:{i}" for i in range(len(rewards))
        ]  # some are choices of one call
        found = line_returns(ids, [(reward, 0.0, 0) for reward in rewards], discount)
        assert found == [(value, 0.0) for value in returns(ids, rewards, discount)]
    turns = [a_call(f"{i}:0", 3, episode=f"e{i // 3}") for i in range(9)]
    signals = [replace(looked(turn, 3, list(range(1, i % 4 + 1))), lines=()) for i, turn in enumerate(turns)]
    plain = {turn.id: agent(turn, [signal], 99.0, **WINDOW).value for turn, signal in zip(turns, signals, strict=True)}
    reached = np.array(
        [
            value
            for part in (turns[3 * k : 3 * k + 3] for k in range(3))
            for value in returns([turn.id for turn in part], [plain[turn.id] for turn in part], 0.9)
        ]
    )
    expected = reached / np.sqrt(np.mean(reached**2))
    assert [credit[0] for credit in credited(turns, signals).values()] == expected.tolist()


def credit_of_pieces(sizes, *, numbers):
    """An edit of ten lines, of which eight are kept, in turns of so many lines: the sum over its lines, and the first call's own credit."""
    lost, first = {3, 7}, 1
    turns, signals = [], []
    for i, size in enumerate(sizes):
        turn = a_call(f"{i}:0", size, episode="edit", at=10.0 + i)
        signal = looked(turn, size, [n for n in range(1, size + 1) if first + n - 1 not in lost])
        turns.append(turn)
        signals.append(signal if numbers else replace(signal, lines=()))
        first += size
    other = a_call("other:0", 1)  # the same in all batches
    found = credited([*turns, other], [*signals, looked(other, 1, [1])])
    unit = found[other.id][0] / 0.5  # of this batch
    return [np.array(found[turn.id]) / unit for turn in turns], turns


@pytest.mark.parametrize("sizes", [[10], [5, 5], [4, 3, 3], [1] * 10])
def test_an_edit_in_pieces_earns_its_lines_kept_less_the_baseline_and_no_more(sizes):
    pieces, turns = credit_of_pieces(sizes, numbers=True)
    total = sum(
        of_line(turn, tuple(piece), line, size)
        for piece, turn, size in zip(pieces, turns, sizes, strict=True)
        for line in range(1, size + 1)
    )
    assert total == pytest.approx(8 - 0.5 * 10, abs=0.35), (
        "each line counts once; a mean with the next lines moves a little"
    )
    first = outside(turns[0], tuple(pieces[0]), sizes[0])
    assert 0.2 < first < 0.4, "the mean of the edit's lines, however many turns wrote them"


def test_shares_without_line_numbers_still_add_up():
    pieces, _ = credit_of_pieces([1] * 10, numbers=False)
    assert pieces[0][0] > 1.5, "without numbers ten pieces pay many times one: what the guide says of such clients"


def test_the_part_of_lines_in_a_return():
    assert line_returns(["a:0", "b:0"], [(0.5, 0.5, 4), (-0.5, -0.5, 4)], 1.0) == [(0.0, 0.0), (-0.5, -0.5)]
    later = line_returns(["a:0", "b:0", "c:0"], [(0.25, 0.0, 0), (0.0, 0.0, 0), (0.7, 0.5, 3)], 0.5)
    plain = returns(["a:0", "b:0", "c:0"], [0.25, 0.0, 0.7], 0.5)
    assert [value for value, _ in later] == pytest.approx(plain), "one turn with lines: as any reward"
    many = line_returns([f"{i}:0" for i in range(50)], [(0.5, 0.5, 1)] * 50, 0.9)
    assert many[0] == pytest.approx((0.5, 0.5))
    choices = line_returns(["a:0", "b:0", "b:1"], [(0.0, 0.0, 0), (0.5, 0.5, 1), (-0.5, -0.5, 3)], 0.5)
    assert choices == [(0.0, 0.0), (0.5, 0.5), (-0.5, -0.5)], "choices do not follow each other"


def test_a_lines_own_fate_decides_its_sign():
    runs = ((1, 1, -0.5), (2, 40, 0.5))
    assert discounted(LineValues(call=0, argument="", lines=40, runs=runs))[1] < -0.2
    ends = discounted(LineValues(call=0, argument="", lines=2, runs=((1, 1, 1.0), (2, 2, 0.0))))
    assert ends == {1: pytest.approx(1 / (1 + LINE_DISCOUNT)), 2: 0.0}


def test_equal_shares_of_other_lines_are_a_contrast():
    turns = [a_call("a:0", 2), a_call("b:0", 2)]
    found = credited(turns, [looked(turns[0], 2, [1]), looked(turns[1], 2, [2])])
    assert of_line(turns[0], found["a:0"], 1, 2) > 0 > of_line(turns[0], found["a:0"], 2, 2)
    with pytest.raises(NoSignal, match="all 2 rewards"):
        credited(turns, [looked(turns[0], 2, [1]), looked(turns[1], 2, [2])], lines=False)
    with pytest.raises(NoSignal):
        credited(turns, [looked(turns[0], 2, [1, 2]), looked(turns[1], 2, [1, 2])])


def test_an_accepted_suggestion_line_by_line():
    turn = replace(a_turn("a:0", sampled=tuple(b"one\ntwo\n")), text="one\ntwo\n")
    accepted = Signal(
        id="s", turn="a:0", name="accepted", value=1.0, source=Source.HUMAN, occurred_at=11.0, received_at=11.0
    )
    signal = looked(turn, 2, [2], call=None, argument="")
    reward = copilot(turn, [accepted, signal], 50.0, **WINDOW)
    assert isinstance(reward, Reward)
    assert reward.value == 0.25
    known = dict(turn_lines(turn, reward, token_bytes).known)
    assert (known[0] < 0.0 < known[4], set(known)) == (True, set(range(8)))
    for others in ([accepted], [accepted, replace(signal, lines=())]):
        plain = copilot(turn, others, 50.0, **WINDOW)
        assert isinstance(plain, Reward)
        assert (plain.value, plain.lines) == (0.75, ())
    rejected = copilot(turn, [replace(accepted, name="rejected"), signal], 50.0, **WINDOW)
    assert isinstance(rejected, Reward)
    assert (rejected.value, rejected.lines) == (-0.25, ())


def test_numbers_that_do_not_cover_what_was_measured_are_left_out():
    turn = a_call("a:0", 4)
    one, other = looked(turn, 4, [1]), replace(looked(turn, 4, [1, 2]), id="other")
    for signals in ([one, other], [one, replace(other, lines=())]):  # the same text twice; one call without numbers
        reward = agent(turn, signals, 99.0, **WINDOW)
        assert isinstance(reward, Reward)
        assert reward.lines == ()
        assert reward.value == pytest.approx((0.25 + 0.5) / 2 - 0.5)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("all", "no LineValues"),
        ((1,), "no LineValues"),
        ([(1, 10**9, 0.5)], "must ascend"),
        ([(3, 2, 0.5)], "must ascend"),
        ([(1, 2, 0.5), (2, 3, 0.5)], "must ascend"),
        ([(0, 2, 0.5)], "must ascend"),
        ([(1, 2, 200.0)], "reward.max_abs"),
        ([(1, 2, float("nan"))], "reward.max_abs"),
    ],
)
def test_nonsense_about_lines_is_a_failure_of_the_function(lines, why):
    turn = a_turn("a:0")
    values = (LineValues(call=0, argument="content", lines=4, runs=tuple(lines)),) if isinstance(lines, list) else lines
    reward = Reward(turn="a:0", value=0.0, function="mine@1", signals=(), at=20.0, lines=values)
    answer = checked(reward, RewardRequest(turn=turn, signals=(), now=99.0), 100.0)
    assert isinstance(answer, Failure)
    assert why in answer.reason


def estimated(lines, answers, seed, *, weights):
    """The cosine of an estimated gradient with the exact one: each line is drawn from a few variants, which survive or not."""
    rng = np.random.default_rng(seed)
    odds_LK = rng.dirichlet(np.ones(3), lines)
    stays_LK = rng.uniform(0.1, 0.9, (lines, 3))
    exact_LK = odds_LK * (stays_LK - (odds_LK * stays_LK).sum(1, keepdims=True))
    drawn_NL = (rng.random((answers, lines, 1)) > odds_LK.cumsum(1)).sum(2).clip(max=2)
    kept_NL = rng.random((answers, lines)) < stays_LK[np.arange(lines), drawn_NL]
    credit_NL = kept_NL @ weights.T
    credit_NL = credit_NL - credit_NL.mean(0)
    scores_NLK = np.eye(3)[drawn_NL] - odds_LK
    found_LK = np.einsum("nl,nlk->lk", credit_NL, scores_NLK)
    return float((found_LK * exact_LK).sum() / np.linalg.norm(found_LK) / np.linalg.norm(exact_LK))


def test_sixteen_lines_take_an_eighth_of_the_answers():
    lines = 16
    values = [[(line, line, float(line == own)) for line in range(1, lines + 1)] for own in range(1, lines + 1)]
    columns = [discounted(LineValues(call=0, argument="", lines=lines, runs=tuple(runs))) for runs in values]
    by_line = np.array([[column[line] for column in columns] for line in range(1, lines + 1)])
    whole = np.full((lines, lines), 1 / lines)
    ours = np.mean([estimated(lines, 100, seed, weights=by_line) for seed in range(40)])
    eight_times = np.mean([estimated(lines, 800, seed, weights=whole) for seed in range(40)])
    as_many = np.mean([estimated(lines, 100, seed, weights=whole) for seed in range(40)])
    assert ours > eight_times > as_many + 0.1
