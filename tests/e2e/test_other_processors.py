"""A fleet of unlike CPUs: what an engine on one samples from, a trainer on another finds with the same bits."""

from functools import cache

import numpy as np
import pytest
from tests.examinations.processors.run import ENGINE, INTEGERS, NO_FMA, TRAINER, differing, score, scored

from ostinato.model import linear
from ostinato.model.kernels.processor import cpu_features
from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_moe, tiny_of

TOKENS = 150


def tiny_gemma(path):
    """Another GELU, norm and rotary embedding, in feed-forward layers of 48 numbers, which torch's vectors of 32 do not fill."""
    return tiny_of(path, SUPPORTED["gemma3"]())


DENSE, *_ = CASES = ((tiny_model, "bfloat16"), (tiny_moe, "float32"), (tiny_gemma, "float32"), (tiny_gemma, "bfloat16"))
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2"}
AVX512 = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directories of the cases' models."""
    return [make(tmp_path_factory.mktemp("model") / "model") for make, _ in CASES]


@pytest.fixture(scope="module")
def here(models):
    """A case's log-probabilities in one of the engine's forms in this process, each computed once: ``here(0, ENGINE)``."""

    @cache
    def found(case, form):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "_order", None)
            return score(models[case], CASES[case][1], form, TOKENS)

    return found


@pytest.fixture(scope="module")
def without_fma(models):
    """Each case's log-probabilities as a trainer's, and last the first one's in 8-bit integers, from one process that compiles for SSE 4.2
    alone, with torch's libraries held to it.
    """
    trained = [(path, dtype, TRAINER) for path, (_, dtype) in zip(models, CASES, strict=True)]
    return scored([*trained, (models[0], DENSE[1], INTEGERS)], TOKENS, NO_FMA)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{make.__name__}-{dtype}" for make, dtype in CASES])
def test_an_engine_here_and_a_trainer_without_fused_multiply_adds_agree_to_the_last_bit(here, without_fma, case):
    ours, theirs = here(case, ENGINE), without_fma[case]
    assert len(ours) == len(theirs) == TOKENS - 1
    assert len(set(ours.tolist())) > 100
    assert differing(ours, theirs) == 0


def check_integers(here, there: np.ndarray) -> None:
    ours = here(0, INTEGERS)
    assert len(ours) == len(there) == TOKENS - 1
    assert len(set(ours.tolist())) > 100
    assert differing(ours, there) == 0
    assert differing(ours, here(0, ENGINE)) > 100, "eight bits are not the model's own numbers"


def test_an_engine_in_eight_bits_gives_the_same_bits_without_fused_multiply_adds(here, without_fma):
    check_integers(here, without_fma[-1])


@pytest.mark.parametrize("switches", [AVX2, AVX512], ids=["AVX2", "AVX-512 without VNNI"])
def test_an_engine_in_eight_bits_gives_the_same_bits_on_every_cpu(models, here, switches):
    needs = {feature.removeprefix("+") for feature in switches["NUMBA_CPU_FEATURES"].split(",")}
    if not needs <= cpu_features():
        pytest.skip(f"this CPU lacks {', '.join(sorted(needs - cpu_features()))}")
    (there,) = scored([(models[0], DENSE[1], INTEGERS)], TOKENS, switches)
    check_integers(here, there)
