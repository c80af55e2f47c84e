"""Steered answers: the trainer has the engine's bits whatever happened meanwhile, and where steering ends is on record."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.engine.paced_clock import PacedClock

from ostinato.core.conversation import Conversation, Demand, Message, Role
from ostinato.core.errors import NoSignal, NotFound
from ostinato.core.generation import Generate
from ostinato.core.records import Batch, PolicyVersion, Sampling, Span, SteeringBasis, Turn
from ostinato.core.samples import Sample, TrainingBatch
from ostinato.core.steering import Basis, Steered, Steering
from ostinato.engine.config import EngineConfig
from ostinato.model.logit_edits import UNEDITED
from ostinato.model.steering import LogitSteering, SteeredToken
from ostinato.record.log import SqlLog
from ostinato.testing.records import a_turn
from ostinato.testing.tiny_engine import tiny_engine, tiny_snapshot
from ostinato.train.config import TrainConfig
from ostinato.train.policy import token_logprobs
from ostinato.train.replay import AnswerEdits
from ostinato.train.stepper import Stepper
from ostinato.train.trainer import PolicyTrainer

CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3)
PROMPT = (70, 71, 72, 73) * 10
BASIS = Basis(
    names=("a", "b"),
    tokens_M=np.arange(40, 200, 2),
    directions_KM=np.random.default_rng(3).standard_normal((2, 80)).astype(np.float32),
    weights="seed0",
)
ASKED = Steering(basis=BASIS, dials=(0.75, -1.5), cap=0.05, budget=1e9)
ROWS = [SteeringBasis.of(BASIS, at=1.0)]


async def turns_of(engine, sampling, *, steering=ASKED, n=1, prompt=PROMPT):
    """The answers to one request as turns."""
    request = Generate(id=str(sampling.seed), slot="live", prompt_ids=prompt, sampling=sampling, n=n, steering=steering)
    chunks = [chunk async for chunk in engine.generate(request)]
    found = []
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk.index == index]
        spans = [Span(policy=chunk.policy, tokens=1) for chunk in mine for _ in chunk.ids]
        found.append(
            replace(
                a_turn(f"{sampling.seed}-{index}:0"),
                prompt_ids=prompt,
                sampled_ids=tuple(token for chunk in mine for token in chunk.ids),
                logprobs=tuple(value for chunk in mine for value in chunk.logprobs),
                spans=tuple(spans),
                nucleus=b"".join(chunk.nucleus for chunk in mine),
                sampling=sampling,
                finish=mine[-1].finish,
                text="".join(chunk.text for chunk in mine),
                steered=mine[-1].steered,
            )
        )
    return found


def trainer_of(path, rows=ROWS):
    made = PolicyTrainer(path, CONFIG)
    made.set_bases(rows)
    return made


def samples(turns):
    return [Sample(turn=turn, reward=1.0, advantages=(1.0,) * len(turn.sampled_ids)) for turn in turns]


def bits(values):
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


VARIANTS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": ((66, 1.5), (80, -0.05))},
    {"top_p": 0.8, "temperature": 1.3, "presence_penalty": -1.0, "stop": ("zz",)},
]


async def test_the_trainer_has_the_engines_bits_after_preemption_with_shared_prefixes_and_several_samples(tmp_path):
    small = EngineConfig(kv_tokens=640, block=16, max_batch=12)  # answers together need several times as much
    async with tiny_engine(tmp_path, small) as tiny:
        asked = [(Sampling(max_tokens=48, seed=seed, **each), 3) for seed, each in enumerate(VARIANTS)]
        found = await asyncio.gather(*(turns_of(tiny.engine, sampling, n=n) for sampling, n in asked))
        stats = tiny.engine.stats()
        plain = await turns_of(tiny.engine, asked[0][0], n=3, steering=None)
        trainer = trainer_of(tiny.path)
    turns = [turn for some in found for turn in some]
    assert stats["preemptions"] > 0
    assert stats["prefix_hit_tokens"] > 0
    assert all(turn.steered.tokens == len(turn.sampled_ids) for turn in turns)
    assert [turn.sampled_ids for turn in turns[:3]] != [turn.sampled_ids for turn in plain]
    assert [bits(found) for found in trainer.score(turns)] == [bits(turn.logprobs) for turn in turns]
    # the base's numbers are others, and so are those of dials that differ by one unit in the last place
    assert sum(differing(trainer, [replace(turn, steered=None) for turn in turns])) > 100
    nudged = (float(np.nextafter(np.float32(0.75), np.float32(1))), -1.5)
    one_ulp = [replace(turn, steered=replace(turn.steered, dials=nudged)) for turn in turns]
    assert sum(differing(trainer, one_ulp)) > 0
    untrainable = [turn for turn in turns if turn.sampling.temperature == 0.0]
    metrics = trainer.step(samples(turn for turn in turns if turn not in untrainable)).metrics
    assert (metrics["mismatch_differing"], metrics["basis_refused"], metrics["turns"]) == (0, 0, len(turns) - 3)


def differing(trainer, turns):
    """How many log-probabilities of each turn differ from the recorded ones."""
    return [
        sum(a != b for a, b in zip(bits(found), bits(turn.logprobs), strict=True))
        for found, turn in zip(trainer.score(turns), turns, strict=True)
    ]


async def test_an_answer_that_meets_a_swap_is_steered_on_and_each_part_has_its_weights_bits(tmp_path):
    """Keys are recomputed at the swap, so the second part is what the second weights give."""
    clock = PacedClock()
    config = EngineConfig(kv_tokens=4096, block=16, recompute_on_swap=True)
    async with tiny_engine(tmp_path, config, clock=clock) as tiny:
        other = tiny_snapshot(tmp_path, 1, seed=1)
        clock.held = True
        task = asyncio.create_task(turns_of(tiny.engine, Sampling(max_tokens=200, seed=1), n=2))
        await clock.until(lambda: tiny.engine.stats()["tokens"] >= 20)
        loading = asyncio.create_task(tiny.engine.load("live", other))
        while not tiny.engine.stats()["orders_open"]:
            await asyncio.sleep(0.001)
        clock.go_on()
        await loading
        turns = await task
        trainers = [trainer_of(path) for path in (tiny.path, tmp_path / "seed1")]
    for turn in turns:
        versions = [span.policy.number for span in turn.spans]
        assert {*versions} == {0, 1}
        assert turn.steered.tokens == len(turn.sampled_ids)
        first, second = (bits(trainer.score([turn])[0]) for trainer in trainers)
        mixed = [(first, second)[number][i] for i, number in enumerate(versions)]
        assert mixed == bits(turn.logprobs)


async def test_the_rest_is_the_base_models_once_the_budget_is_spent(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        sampling = Sampling(max_tokens=60, seed=4)
        (turn,) = await turns_of(tiny.engine, sampling, steering=replace(ASKED, budget=0.4))
        (none,) = await turns_of(tiny.engine, sampling, steering=replace(ASKED, budget=0.01))
        (base,) = await turns_of(tiny.engine, sampling, steering=None)
        trainer = trainer_of(tiny.path)
    assert 5 < turn.steered.tokens < 50
    assert 0.4 - ASKED.cap < turn.steered.kl <= 0.4
    assert trainer.score([turn]) == [turn.logprobs]
    assert (none.sampled_ids, none.logprobs) == (base.sampled_ids, base.logprobs)
    assert (none.steered.tokens, none.steered.kl, none.steered.features) == (0, 0.0, (0.0, 0.0))


async def test_nothing_is_steered_after_a_tool_call_opens_nor_where_a_form_is_demanded(tmp_path, monkeypatch):
    async with tiny_engine(tmp_path) as tiny:
        read = []
        monkeypatch.setattr(tiny.renderer, "opens_call", lambda text: read.append(text) or len(read) == 7)
        (turn,) = await turns_of(tiny.engine, Sampling(max_tokens=60, seed=5))
        said = b"".join(map(tiny.renderer.token_bytes, turn.sampled_ids[:7])).decode(errors="ignore")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        asked = Conversation(messages=(Message(role=Role.USER, text="A?"),), demand=Demand(schema=schema))
        formed = Sampling(max_tokens=60, seed=2, grammar=tiny.renderer.grammar(asked))
        (demanded,) = await turns_of(tiny.engine, formed)
        (base,) = await turns_of(tiny.engine, formed, steering=None)
        trainer = trainer_of(tiny.path)
    assert read[6:] == [said], "a call opens with the seventh token"
    assert 7 == turn.steered.tokens < len(turn.sampled_ids)
    assert trainer.score([turn]) == [turn.logprobs]
    assert demanded.steered.tokens == 0
    assert demanded.logprobs == base.logprobs


async def test_fenced_code_is_the_base_models_and_the_trainer_replays_what_is_around_it(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        fence, line, word = (tiny.renderer.encode(text)[0] for text in ("`", "\n", "x"))
        basis = Basis(("words",), np.array([word]), np.array([[1.0]], np.float32), "seed0")
        asked = Steering(basis=basis, dials=(0.5,), cap=0.05, budget=1e9)
        only = ((fence, 100.0), (line, 99.5), (word, 99.0))  # nothing else is sampled
        sampling = Sampling(max_tokens=160, seed=3, logit_bias=only)
        turns = await turns_of(tiny.engine, sampling, steering=asked, n=4)
        trainer = trainer_of(tiny.path, [SteeringBasis.of(basis, at=1.0)])
        spelled = [[tiny.renderer.token_bytes(token) for token in turn.sampled_ids] for turn in turns]
    plain = trainer.score([replace(turn, steered=None) for turn in turns])
    closed = 0
    for turn, pieces, base in zip(turns, spelled, plain, strict=True):
        fenced = [in_code(b"".join(pieces[:place])) for place in range(len(pieces))]
        assert 10 < sum(fenced) < len(fenced) - 10
        gaps = [place for start, stop in turn.steered.gaps for place in range(start, stop)]
        assert gaps == [place for place in range(turn.steered.end) if fenced[place]]
        assert all(fenced[turn.steered.end :])
        assert turn.steered.tokens == fenced.count(False)
        closed += len(gaps)
        same = [a == b for a, b in zip(bits(base), bits(turn.logprobs), strict=True)]
        assert all(same[place] for place in range(len(same)) if fenced[place])
        assert not all(same)
    assert closed, "steering goes on behind a close"
    assert sum(differing(trainer, turns)) == 0
    metrics = trainer.step(samples(turns)).metrics
    assert (metrics["mismatch_differing"], metrics["basis_refused"], metrics["steered_over_cap"]) == (0, 0, 0)
    assert metrics["steered_tokens"] == sum(turn.steered.tokens for turn in turns)
    total = sum(turn.steered.kl for turn in turns)
    assert metrics["steered_kl"] * metrics["steered_tokens"] == pytest.approx(total, rel=1e-9)
    assert 0.0 < metrics["steered_kl"] <= 0.05


def in_code(text):
    """CommonMark's rule, line by line over the whole text."""
    fence = 0
    *lines, last = text.split(b"\n")
    for line in lines:
        run = len(line) - len(line.lstrip(b"`"))
        if not fence:
            fence = run if run >= 3 and b"`" not in line[run:] else 0
        elif run >= fence and not line[run:]:
            fence = 0
    run = len(last) - len(last.lstrip(b"`"))
    return bool(fence) or (run >= 3 and b"`" not in last[run:])


async def test_a_turn_that_lies_about_its_steering_is_left_out_by_name(tmp_path, caplog):
    async with tiny_engine(tmp_path) as tiny:
        (turn,) = await turns_of(tiny.engine, Sampling(max_tokens=20, seed=1))
        trainer = trainer_of(tiny.path)
    lies = {
        "1.01 nats in 20 tokens break its cap of 0.05": {"kl": 1.01},
        "or its budget of 0.1": {"budget": 0.1},
        "break its cap of 0.001": {"cap": 0.001},
        "its cap is not above 0": {"cap": 0.0},
        "a number is not finite": {"dials": (float("inf"), 0.0)},
        "do not fit an answer of 20": {"tokens": 21},
        "with the gaps ((3, 3),)": {"tokens": 10, "gaps": ((3, 3),)},
        "with the gaps ((0, 1000000000000),)": {"gaps": ((0, 10**12),)},
        "-0.5 nats in 20 tokens": {"kl": -0.5},
        "does not fit the basis": {"features": (0.1,)},
        "in 0 tokens break its cap": {"tokens": 0},
    }
    liars = [replace(turn, id=f"l{n}:0", steered=replace(turn.steered, **lie)) for n, lie in enumerate(lies.values())]
    metrics = trainer.step(samples([turn, *liars])).metrics
    assert (metrics["turns"], metrics["basis_refused"], metrics["mismatch_differing"]) == (1, len(lies), 0)
    said = [record.message for record in caplog.records if "is left out" in record.message]
    for number, why in enumerate(lies):
        assert f"turn l{number}:0 is left out" in said[number]
        assert why in said[number]


def test_a_token_beyond_its_cap_is_counted_once():
    edits = AnswerEdits(lambda: pytest.fail("no grammar"))
    edits.set_bases(ROWS)
    steered = Steered(basis=BASIS.hash, dials=(0.5, 0.5), cap=0.05, budget=3.0, tokens=2, kl=0.1, features=(0.0, 0.0))
    turn = replace(a_turn("t:0"), steered=steered)
    made = edits.replay([turn], 0, len(turn.sampled_ids))
    for kl in (0.04, 0.06, 0.05):
        made[0].steering.on_token(SteeredToken(kl=kl, means_K=np.zeros(2)))
    made[1].steering.on_token(SteeredToken(kl=0.01, means_K=np.zeros(2)))
    assert edits.settle() == {"steered_tokens": 2.0, "steered_kl": pytest.approx(0.03), "steered_over_cap": 1.0}
    assert edits.settle()["steered_tokens"] == 0.0


async def test_a_turn_of_an_unknown_basis_is_left_out_by_name(tmp_path, caplog):
    async with tiny_engine(tmp_path) as tiny:
        turns = await turns_of(tiny.engine, Sampling(max_tokens=20, seed=1), n=3)
        base = await turns_of(tiny.engine, Sampling(max_tokens=20, seed=2), steering=None)
        trainer = trainer_of(tiny.path, [])
    metrics = trainer.step(samples([*turns, *base])).metrics
    assert (metrics["turns"], metrics["basis_refused"]) == (1, 3)
    assert f"the basis {BASIS.hash} of its steering is not known" in caplog.text
    with pytest.raises(NoSignal, match="steered by a basis"):
        trainer.step(samples(turns))
    forged = replace(ROWS[0], directions=ROWS[0].directions[::-1])
    trainer.set_bases([forged])
    with pytest.raises(NoSignal, match="steered by a basis"):
        trainer.step(samples(turns))
    trainer.set_bases(ROWS)
    longer = [replace(turn, id="x:0", steered=replace(turn.steered, tokens=21)) for turn in turns[:1]]
    assert trainer.step(samples([*turns, *longer])).metrics["basis_refused"] == 1


async def test_steered_turns_are_on_policy_and_their_gradient_is_the_steered_distributions(tmp_path):
    """Against autograd over the same rows, with the pushes as constants."""
    steering = LogitSteering.of(BASIS, (0.25, -0.5), 50.0, 0.8)
    torch.manual_seed(0)
    weight = torch.randn(260, 8, requires_grad=True)
    states, targets, heat = torch.randn(4, 8), torch.tensor([44, 3, 120, 41]), torch.full((4,), 0.8)
    edits = {i: replace(UNEDITED, steering=steering) for i in (0, 2, 3)}
    pushes = torch.zeros(4, 260)
    pushes[[0, 2, 3]] = torch.zeros(260).index_put(
        (torch.from_numpy(BASIS.tokens_M),), torch.from_numpy(steering.pushes_M)
    )
    want = ((states @ weight.T + pushes) / 0.8).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    coefficients = torch.tensor([1.0, -2.0, 0.5, 1.5])
    (want * coefficients).sum().backward()
    gradient, weight.grad = weight.grad, None
    for keep in (True, False):
        found = token_logprobs(lambda hidden: hidden @ weight.T, states, targets, heat, lambda a, b: edits, keep=keep)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
        (found * coefficients).sum().backward()
        torch.testing.assert_close(weight.grad, gradient, atol=1e-5, rtol=1e-5)
        weight.grad = None


async def test_a_step_looks_its_turns_bases_up_in_the_log(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        turns = await turns_of(tiny.engine, Sampling(max_tokens=20, seed=1), n=2)
        trainer, seen = PolicyTrainer(tiny.path, CONFIG), []
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*ROWS, *turns)

        async def bases(hashes):
            return await log.find(SteeringBasis, [(name,) for name in hashes])

        stored = await log.find(Turn, [(turn.id,) for turn in turns])
        row = Batch(step=1, turns=(), credits=(), reference=PolicyVersion(number=0, hash="seed0"), at=0.0)
        stepper = Stepper(trainer, no_weights, seen.append, bases=bases)
        await stepper.step(TrainingBatch(row=row, samples=tuple(samples(stored))))
    assert [turn.steered for turn in stored] == [turn.steered for turn in turns]
    metrics = seen[0].metrics
    assert (metrics["turns"], metrics["basis_refused"], metrics["mismatch_differing"]) == (2, 0, 0)
    assert metrics["on_policy"] == 1.0


async def no_weights(policy):
    raise NotFound(f"{policy} was asked for")
