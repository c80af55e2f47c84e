"""The steering of a row of logits: its divergence is the dense one and within the cap, its features are derivatives, rows stand alone."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.core.errors import BadRequest
from ostinato.core.generation import Generate
from ostinato.core.records import Sampling
from ostinato.core.steering import CLIP, Basis, Steering
from ostinato.engine.admission import check_request
from ostinato.engine.embedded.sampler import Draw, draw
from ostinato.model.logit_edits import UNEDITED, Edit
from ostinato.model.steering import AnswerSteering, CodeFences, LogitSteering, StaticSteering

VOCAB = 700


def a_basis(seed: int, dials: int = 3, tokens: int = 60, size: float = 1.0) -> Basis:
    rng = np.random.default_rng(seed)
    return Basis(
        names=tuple(f"d{i}" for i in range(dials)),
        tokens_M=np.sort(rng.choice(VOCAB, tokens, replace=False)).astype(np.int64),
        directions_KM=(size * rng.standard_normal((dials, tokens))).astype(np.float32),
        weights="w",
    )


def rows_of(seed: int, rows: int, spread: float) -> torch.Tensor:
    return torch.from_numpy((spread * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32))


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In fp64, of what the softmax kernel reads: logits / temperature in fp32."""
    return (logits / np.float32(temperature)).double().log_softmax(-1)


@example(seed=668, spread=30.0, dial=1e30, cap=0.001, temperature=0.001, masked=True)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    dial=st.sampled_from([1e-4, 0.1, 1.0, 30.0, 1e30]),
    cap=st.sampled_from([1e-6, 1e-3, 0.1, 5.0]),
    temperature=st.sampled_from([0.001, 0.3, 1.0, 1.7, 100.0]),
    masked=st.booleans(),
)
def test_its_kl_is_the_dense_one_and_never_above_the_cap(seed, spread, dial, cap, temperature, masked):
    basis, base = a_basis(seed), rows_of(seed, 1, spread)
    base[0, basis.tokens_M[5]] += 4 * spread
    if masked:
        base[0, ::3] = -torch.inf
    dials = [float(np.float32(dial * sign)) for sign in (1, -1, 1)]
    steered = base.clone()
    found = LogitSteering.of(basis, dials, cap, temperature).apply(steered[0])
    before, after = log_softmax(base, temperature)[0], log_softmax(steered, temperature)[0]
    seen = after.exp() > 0
    dense = float((after.exp() * (after - before))[seen].sum())
    # in fp64, too, a logit's rounding is divided by the temperature, and so is the difference that the probability multiplies
    assert found.kl == pytest.approx(dense, abs=max(1e-9, 1e-13 / temperature**2))
    assert -1e-12 <= found.kl <= cap
    assert dense <= cap + 1e-9
    mean = (after.exp()[basis.tokens_M].numpy() * basis.directions_KM).sum(1)
    assert found.means_K == pytest.approx(mean, abs=1e-9)
    moved = (steered - base)[0].nan_to_num(0.0)
    assert float(moved.abs().max()) <= CLIP * (1 + 1e-6) + 1e-6 * spread * 10
    others = np.setdiff1d(np.arange(VOCAB), basis.tokens_M)
    assert torch.equal(steered[0, others], base[0, others])
    assert torch.equal(steered.isinf(), base.isinf())


@given(seed=st.integers(0, 10_000), cap=st.sampled_from([0.003, 0.1]))
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(seed, cap):
    basis, rows_MV = a_basis(seed), rows_of(seed, 7, 4.0).bfloat16()
    asked = [
        Draw(
            temperature=(1.0, 0.7)[i % 2],
            top_p=1.0,
            u=i / 7,
            edit=None
            if i % 3 == 0
            else Edit(*edited(i), None, LogitSteering.of(basis, (0.5 * i, -1.0, 0.25), cap, (1.0, 0.7)[i % 2])),
        )
        for i in range(7)
    ]
    together = draw(rows_MV.clone(), asked)
    for i, row in enumerate(asked):
        alone = draw(rows_MV[i : i + 1].clone(), [row])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])
        one, other = alone.steered[0], together.steered[i]
        assert (one is None) == (other is None) == (i % 3 == 0)
        if one is not None and other is not None:
            assert one.kl == other.kl
            assert one.means_K.tobytes() == other.means_K.tobytes()


def edited(i: int):
    """A client's bias, or none."""
    return (np.array([3, 9]), np.array([1.5, -0.05], np.float32)) if i % 2 else (UNEDITED.ids, UNEDITED.values)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_features_are_the_derivatives_of_the_log_probability(temperature):
    """Where neither the clip nor the cap binds: central differences in fp64, over an answer of five tokens."""
    basis, rows_TV = a_basis(4, size=0.3), rows_of(4, 5, 2.0)
    dials = (0.5, -0.25, 0.125)
    tokens = [int(basis.tokens_M[7]), 3, int(basis.tokens_M[50]), 11, 650]
    asked = Steering(basis=basis, dials=dials, cap=50.0, budget=1e9)
    answer = AnswerSteering(
        asked, LogitSteering.of(basis, dials, 50.0, temperature), lambda text: False, lambda token: b""
    )
    for row_V, token in zip(rows_TV, tokens, strict=True):
        row = answer.row()
        assert row is not None
        answer.take(token, row.apply(row_V.clone()))

    def logprob(z) -> float:
        steered = rows_TV.double()
        steered[:, basis.tokens_M] += torch.from_numpy(np.asarray(z) @ basis.directions_KM.astype(np.float64))
        return float((steered / temperature).log_softmax(-1)[range(5), tokens].sum())

    h = 1e-4
    slopes = [(logprob(dials + h * e) - logprob(dials - h * e)) / (2 * h) for e in np.eye(3)]
    found = answer.result()
    assert found.features == pytest.approx(slopes, abs=1e-5)
    assert max(map(abs, slopes)) > 0.1
    assert found.tokens == 5


def test_the_quadratic_estimate_exceeds_the_cap_where_the_exact_one_holds_it():
    """A dial that pushes one likely token: half of z F z, by which others limit it, says 0.1, and the divergence is more."""
    basis = Basis(("up",), np.array([5]), np.array([[1.0]], np.float32), "w")
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 3.0
    p = float(logits.double().softmax(-1)[0, 5])
    dial = float(np.float32((0.2 / (p * (1 - p))) ** 0.5))
    dense = LogitSteering.of(basis, (dial,), 10.0, 1.0).apply(logits.clone()[0]).kl
    capped = LogitSteering.of(basis, (dial,), 0.1, 1.0).apply(logits.clone()[0]).kl
    assert dense > 0.12
    assert 0.099 < capped <= 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_stay_as_they_are(bad):
    basis, base = a_basis(1), rows_of(1, 1, 2.0)
    base[0, 8] = bad
    steered = base.clone()
    assert LogitSteering.of(basis, (1.0, 1.0, 1.0), 0.1, 1.0).apply(steered[0]).kl == 0.0
    assert torch.equal(steered.nan_to_num(7.0), base.nan_to_num(7.0))
    assert not draw(base, [Draw(temperature=1.0, top_p=1.0, u=0.5)]).sound[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dials": (float("nan"), 0.0, 0.0)}, "finite float32"),
        ({"dials": (float("inf"), 0.0, 0.0)}, "finite float32"),
        ({"dials": (0.1, 0.0, 0.0)}, "finite float32"),
        ({"dials": (0.5,)}, "takes 3"),
        ({"cap": float("nan")}, "cap"),
        ({"cap": 0.0}, "cap"),
        ({"budget": float("inf")}, "budget"),
        ({"basis": Basis(("a", "b", "c"), np.array([VOCAB]), np.ones((3, 1), np.float32), "w")}, "outside"),
    ],
)
def test_what_cannot_be_steered_by_is_refused(change, says):
    fields = {"basis": a_basis(0), "dials": (0.5, 0.0, -1.0), "cap": 0.1, "budget": 3.0}

    def ask(steering, *, steers="exact"):
        request = Generate(
            id="r", slot="live", prompt_ids=(1,), sampling=Sampling(max_tokens=4), steering=Steering(**steering)
        )
        check_request(request, context=99, vocab_size=VOCAB, steers=steers)

    ask(fields)
    with pytest.raises(BadRequest, match=says):
        ask(fields | change)
    with pytest.raises(BadRequest, match="cannot steer"):
        ask(fields, steers="no")


def test_the_sum_never_exceeds_the_budget_and_the_rest_is_the_base():
    basis = a_basis(2)
    asked = Steering(basis=basis, dials=(2.0, -2.0, 2.0), cap=0.1, budget=0.55)
    rows = LogitSteering.of(basis, asked.dials, asked.cap, 1.0)
    answer = AnswerSteering(asked, rows, lambda text: False, lambda token: b"x")
    for t in range(30):
        row = answer.row()
        answer.take(t, None if row is None else row.apply(rows_of(t, 1, 0.5)[0]))
    found = answer.result()
    assert found.tokens in range(4, 30)
    assert 0.45 < found.kl <= 0.55


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```", True),
        ("``", False),
        ("a ``` b", False),
        ("So:\n```py\nx = 1", True),
        ("So:\n```py\nx = 1\n```", True),  # the close counts at the end of its line
        ("So:\n```py\nx = 1\n```\n", False),
        ("```x``` is inline code", False),
        ("~~~\n```\n", True),
        ("~~~\n~~~ \r\nOn", False),
        ("````\n```\n", True),
        ("````\n`````\n", False),
        ("- a list:\n     ```\n     x", True),
        ("> ```\n> x\n> ```\n", False),
        ("```\n``` py\n", True),
        ("```\n" + "x" * 5000 + "\n```\n", False),
    ],
)
def test_fenced_code_lasts_from_its_third_character_to_the_end_of_its_closing_line(text, inside):
    fences = CodeFences()
    fences.feed(text.encode())
    assert fences.inside is inside


@given(
    pieces=st.lists(st.sampled_from(["`", "```", "\n", "\n```\n", "x", "~~~\n", " ", "````py\n", "é"]), max_size=40),
    seed=st.integers(0, 1000),
)
def test_where_code_is_fenced_does_not_depend_on_how_the_text_is_cut(pieces, seed):
    text, at = "".join(pieces).encode(), 0
    whole, cut, rng = CodeFences(), CodeFences(), np.random.default_rng(seed)
    whole.feed(text)
    while at < len(text):
        size = int(rng.integers(1, 5))
        cut.feed(text[at : at + size])
        at += size
    assert cut.inside is whole.inside


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    dial=st.sampled_from([0.1, 1.0, 30.0, 1e30]),
    cap=st.sampled_from([1e-3, 0.1, 1.0]),
    tokens=st.sampled_from([1, 30, 4000]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
)
def test_a_static_bias_breaks_neither_cap_nor_budget_whatever_the_logits_are(
    seed, spread, dial, cap, tokens, temperature
):
    """And so the scale of the exact steering with the same clip is 1: the trainer replays it as it is."""
    basis, base = a_basis(seed), rows_of(seed, 1, spread)
    base[0, basis.tokens_M[5]] += 4 * spread
    dials = tuple(float(np.float32(dial * sign)) for sign in (1, -1, 1))
    asked = Steering(basis=basis, dials=dials, cap=cap, budget=3.0)
    static = StaticSteering(asked, Sampling(max_tokens=tokens, temperature=temperature))
    found = static.result(tokens)
    assert found.fault(tokens) == ""
    assert found.kl <= 3.0
    biased = base.clone()
    for token, push in static.biases.items():
        biased[0, token] += np.float32(push)
    divisor = temperature or 1.0
    before, after = log_softmax(base, divisor)[0], log_softmax(biased, divisor)[0]
    assert float((after.exp() * (after - before)).sum()) <= found.kl / tokens + 1e-9
    replayed = base.clone()
    LogitSteering.of(basis, dials, cap, temperature, found.clip).apply(replayed[0])
    assert torch.equal(replayed, biased)


def test_the_bound_of_a_static_bias_is_tight_and_it_covers_what_the_note_of_the_cap_says():
    basis = Basis(("both",), np.array([0, 1]), np.array([[1.0, -1.0]], np.float32), "w")
    asked = Steering(basis=basis, dials=(30.0,), cap=0.1, budget=3.0)
    static = StaticSteering(asked, Sampling(max_tokens=30))
    assert static.biases == pytest.approx({0: 0.4472, 1: -0.4472}, abs=1e-4)
    even = torch.tensor([[0.0, 0.0]])
    after = (even + torch.tensor([[static.biases[0], static.biases[1]]])).double().log_softmax(-1)
    assert 0.09 < float((after.exp() * (after - even.double().log_softmax(-1))).sum()) <= 0.1
    assert StaticSteering(asked, Sampling(max_tokens=4, grammar="x")).biases == {}
    assert StaticSteering(asked, Sampling(max_tokens=4, grammar="x")).result(4).tokens == 0


def test_an_engine_that_steers_by_biases_takes_so_many_tokens_of_basis_and_client_together():
    tokens_M = np.arange(1020)
    basis = Basis(("a",), tokens_M, np.ones((1, 1020), np.float32), "w")
    steering = Steering(basis=basis, dials=(0.5,), cap=0.1, budget=3.0)

    def check(biases, steers="static"):
        sampling = Sampling(max_tokens=4, logit_bias=tuple((token, 1.0) for token in biases))
        request = Generate(id="r", slot="live", prompt_ids=(1,), sampling=sampling, steering=steering)
        check_request(request, context=99, vocab_size=5000, steers=steers)

    check(range(1016, 1024))
    check(range(1016, 1025), steers="exact")
    with pytest.raises(BadRequest, match="name 1025 tokens; this engine steers by biases, 1024 at most"):
        check(range(1016, 1025))
