"""The documented example, and the saving on the workload that packing is for."""

import pytest

from ostinato.train.batch.packing import TokenTurn, microbatches, pack


def test_the_documented_example():
    packed = pack([TokenTurn(prompt=(1, 2), sampled=(7, 8)), TokenTurn(prompt=(1, 2), sampled=(9,))])
    assert packed.ids_N.tolist() == [1, 2, 7]
    assert packed.positions_N.tolist() == [0, 1, 2]
    assert packed.ends_N.tolist() == [3, 3, 3]
    assert packed.rows_M.tolist() == [1, 2, 1]
    assert packed.targets_M.tolist() == [7, 8, 9]
    assert packed.turns_M.tolist() == [0, 0, 1]
    assert (packed.unpacked, packed.saved) == (5, 2)


def test_a_follow_up_turn_computes_only_what_is_new():
    first = TokenTurn(prompt=(1, 2, 3), sampled=(4, 5))
    second = TokenTurn(prompt=(1, 2, 3, 4, 5, 6), sampled=(7,))
    assert pack([second, first]).ids_N.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_common_head_and_repeated_prompts_are_computed_once():
    head = tuple(range(35))
    prompts = [head + tuple(100 * p + i for i in range(65)) for p in range(1, 41)]
    turns = [
        TokenTurn(prompt=prompts[i % 40], sampled=tuple(10_000 * (i + 1) + t for t in range(30))) for i in range(144)
    ]
    packed = pack(turns)
    assert packed.tokens == 35 + 40 * 65 + 144 * 29
    assert packed.saved == 144 * 129 - packed.tokens
    split = [pack([turns[i] for i in batch]) for batch in microbatches(turns, 2048)]
    assert len(split) == 4
    assert sum(part.tokens for part in split) < 1.05 * packed.tokens


@pytest.mark.parametrize(("prompt", "sampled"), [((), (1,)), ((1,), ())])
def test_a_turn_without_tokens_is_refused(prompt: tuple[int, ...], sampled: tuple[int, ...]):
    with pytest.raises(ValueError, match="at least one"):
        TokenTurn(prompt=prompt, sampled=sampled)
