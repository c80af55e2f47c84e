"""A fleet of unlike CPUs: what an engine on one samples from, a trainer on another finds with the same bits."""

import pytest
from tests.examinations.processors.run import NO_FMA, differing, score, scored

from ostinato.model import linear
from ostinato.testing.tiny import tiny_model
from ostinato.testing.tiny_moe import tiny_moe


@pytest.mark.parametrize(("make", "dtype"), [(tiny_model, "bfloat16"), (tiny_moe, "float32")])
def test_an_engine_here_and_a_trainer_without_fused_multiply_adds_agree_to_the_last_bit(
    tmp_path, monkeypatch, make, dtype
):
    """The trainer's process compiles for SSE 4.2 alone, and torch's libraries are held to it."""
    monkeypatch.setattr(linear, "_order", None)
    path = make(tmp_path / "model")
    here = score(path, dtype, 150, engine=True)
    there = scored(path, dtype, 150, NO_FMA)
    assert len(here) == len(there) == 149
    assert len(set(here.tolist())) > 100
    assert differing(here, there) == 0
