"""The documented example, and the saving on the workloads that packing is for."""

import itertools

import pytest
from tests.growth import grows_with_its_input

from ostinato.train.packing import TokenTurn, microbatches, pack
from ostinato.train.tree_attention import Layout


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


def episode(start: int, *, turns: int, sampled: int = 100, tool: int = 100) -> list[TokenTurn]:
    """An agent's episode: each prompt is the one before it, what was sampled, and what a tool answered."""
    ids, prompt, made = iter(range(start, 10_000_000)), tuple(range(start)), []
    for _ in range(turns):
        made.append(TokenTurn(prompt=prompt, sampled=tuple(itertools.islice(ids, sampled))))
        prompt += made[-1].sampled + tuple(itertools.islice(ids, tool))
    return made


def computed(turns: list[TokenTurn], budget: int, **limits: float) -> list[int]:
    """Tokens of each micro-batch."""
    return [pack([turns[i] for i in batch]).tokens for batch in microbatches(turns, budget, **limits)]


@pytest.mark.parametrize(("start", "tree"), [(200, 2_499), (1_200, 3_499)])
def test_an_episode_shares_its_prefixes_beyond_the_budget(start: int, tree: int):
    turns = episode(start, turns=12)
    assert pack(turns).tokens == tree
    assert sum(computed(turns, 1024)) <= 1.1 * tree


def test_samples_of_a_prompt_longer_than_the_budget_share_it():
    turns = [
        TokenTurn(prompt=tuple(range(1_200)), sampled=tuple(range(2_000 * i, 2_000 * i + 36))) for i in range(1, 17)
    ]
    assert computed(turns, 1024) == [1_200 + 16 * 35]


def test_beyond_the_largest_size_half_may_be_computed_again():
    turns = [
        TokenTurn(prompt=tuple(range(500)), sampled=tuple(range(2_000 * i, 2_000 * i + 101))) for i in range(1, 31)
    ]
    assert computed(turns, 64) == [500 + 30 * 100]
    assert computed(turns, 64, largest=1_500) == [1_500, 1_500, 1_500]


def test_what_shares_more_than_half_is_not_cut_even_beyond_the_largest_size():
    """Larger than `largest`, than twice the shared prefix and than the longest path; never than twice that."""
    one = TokenTurn(prompt=tuple(range(60)), sampled=tuple(range(1_000, 1_031)))
    other = TokenTurn(prompt=tuple(range(60)), sampled=tuple(range(2_000, 2_101)))
    assert computed([one, other], 16, largest=100) == [190]


def test_an_episode_of_32k_tokens_is_packed_in_time_that_grows_with_what_is_read():
    short, long = episode(1_200, turns=52), episode(1_200, turns=155)
    assert sum(len(turn.path) for turn in long) < 8 * sum(len(turn.path) for turn in short)
    assert computed(long, 1024) == [32_099]
    assert grows_with_its_input(lambda turns: computed(turns, 1024), short, long)


@pytest.mark.parametrize(("turns", "tokens"), [(75, 16_099), (155, 32_099)])
def test_the_layout_of_a_long_episode_grows_with_its_tokens(turns: int, tokens: int):
    """A few numbers per token, and no layout of all queries by all keys: that would be 8 GB at 32k tokens."""
    layout = Layout(pack(episode(1_200, turns=turns)))
    places, reads = layout.places, layout.reads
    held = (places.tokens, places.blocks, places.offsets, reads.positions_N, reads.where_N, reads.table)
    assert len(reads.positions_N) == tokens
    assert sum(array.nbytes for array in held) < 48 * tokens
    assert len(layout.tiles(16)) <= tokens / 16 + 1


@pytest.mark.parametrize(("prompt", "sampled"), [((), (1,)), ((1,), ())])
def test_a_turn_without_tokens_is_refused(prompt: tuple[int, ...], sampled: tuple[int, ...]):
    with pytest.raises(ValueError, match="at least one"):
        TokenTurn(prompt=prompt, sampled=sampled)
