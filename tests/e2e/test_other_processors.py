"""A fleet of unlike CPUs: what an engine on one samples from, a trainer on another finds with the same bits."""

import pytest
from tests.examinations.processors.run import NO_FMA, differing, score, scored

from ostinato.model import linear
from ostinato.model.kernels.processor import cpu_features
from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_moe, tiny_of

TOKENS = 150


def tiny_gemma(path):
    """Another GELU, norm and rotary embedding, in feed-forward layers of 48 numbers, which torch's vectors of 32 do not fill."""
    return tiny_of(path, SUPPORTED["gemma3"]())


DENSE, *_ = CASES = ((tiny_model, "bfloat16"), (tiny_moe, "float32"), (tiny_gemma, "float32"), (tiny_gemma, "bfloat16"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directories of the cases' models."""
    return [make(tmp_path_factory.mktemp("model") / "model") for make, _ in CASES]


@pytest.fixture(scope="module")
def without_fma(models):
    """Each case's log-probabilities from a process that compiles for SSE 4.2 alone, with torch's libraries held to it, as a trainer."""
    return scored([(path, dtype) for path, (_, dtype) in zip(models, CASES, strict=True)], TOKENS, NO_FMA)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{make.__name__}-{dtype}" for make, dtype in CASES])
def test_an_engine_here_and_a_trainer_without_fused_multiply_adds_agree_to_the_last_bit(
    monkeypatch, models, without_fma, case
):
    monkeypatch.setattr(linear, "_order", None)
    here, there = score(models[case], CASES[case][1], TOKENS, engine=True), without_fma[case]
    assert len(here) == len(there) == TOKENS - 1
    assert len(set(here.tolist())) > 100
    assert differing(here, there) == 0


AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2"}
AVX512 = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl",
}


@pytest.mark.parametrize("switches", [NO_FMA, AVX2, AVX512], ids=["no FMA", "AVX2", "AVX-512 without VNNI"])
def test_an_engine_in_eight_bits_gives_the_same_bits_on_every_cpu(tmp_path, monkeypatch, switches):
    needs = {feature.removeprefix("+") for feature in switches.get("NUMBA_CPU_FEATURES", "").split(",") if feature}
    if not needs <= cpu_features():
        pytest.skip(f"this CPU lacks {', '.join(sorted(needs - cpu_features()))}")
    monkeypatch.setattr(linear, "_order", None)
    make, dtype = DENSE
    path = make(tmp_path / "model")
    here = score(path, dtype, TOKENS, engine=True, int8=True)
    (there,) = scored([(path, dtype)], TOKENS, switches, engine=True, int8=True)
    assert len(set(here.tolist())) > 100
    assert differing(here, there) == 0
    assert differing(here, score(path, dtype, TOKENS, engine=True)) > 100, "eight bits are not the model's own numbers"
