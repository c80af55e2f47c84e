"""Routes on a packed tree: every token gets its own turn's, shared prefixes the first one's, and bad ones a reason."""

import numpy as np
import pytest

from ostinato.core import routes as codec
from ostinato.testing.records import a_turn
from ostinato.train.packing import TokenTurn, pack
from ostinato.train.replay import lay_out


def path_routes(tokens, seed, *, layers=2, experts=8, top_k=3):
    rng = np.random.default_rng(seed)
    return np.sort(
        rng.permuted(np.tile(np.arange(experts), (tokens, layers, 1)), axis=-1)[..., :top_k], axis=-1
    ).astype(np.uint8)


def test_each_token_of_the_tree_gets_the_routes_of_its_turn():
    turns = [TokenTurn(prompt=(1, 2, 3), sampled=(9, 5)), TokenTurn(prompt=(1, 2), sampled=(7, 8, 4))]
    first, second = path_routes(4, 0), path_routes(4, 1)
    second[:2] = first[:2]  # the shared prefix 1, 2 was computed once
    packed = pack(turns)
    found = lay_out(packed, [first, second])
    assert found.disagreements == 0
    by_path = {(1,): first[0], (1, 2): first[1], (1, 2, 3): first[2], (1, 2, 3, 9): first[3]}
    by_path |= {(1, 2, 7): second[2], (1, 2, 7, 8): second[3]}
    assert packed.tokens == len(by_path)
    for token in range(packed.tokens):
        path = tuple(packed.ids_N[np.flatnonzero(packed.ends_N[: token + 1] > token)].tolist())
        assert (found.ids_NLk[token] == by_path[path]).all(), path


def test_where_turns_disagree_the_first_wins_and_it_is_counted():
    turns = [TokenTurn(prompt=(1, 2, 3), sampled=(9,)), TokenTurn(prompt=(1, 2, 3), sampled=(9,))]
    first, second = path_routes(3, 0), path_routes(3, 0)
    second[1, 0] = [5, 6, 7] if first[1, 0].tolist() != [5, 6, 7] else [0, 1, 2]
    second[2] = path_routes(1, 99)[0]
    found = lay_out(pack(turns), [first, second])
    assert (found.ids_NLk == first).all()
    assert found.disagreements == 1 + int((first[2] != second[2]).any(-1).sum())


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_layout_follows_the_turns_and_not_their_order(order):
    turns = [TokenTurn(prompt=(4, 5), sampled=(i, i + 1, i)) for i in (7, 1, 3)]
    routes = [path_routes(4, seed) for seed in range(3)]
    for other in routes[1:]:
        other[:2] = routes[0][:2]
    packed = pack([turns[i] for i in order])
    found = lay_out(packed, [routes[i] for i in order])
    for place, i in enumerate(order):
        last = packed.rows_M[packed.turns_M == place][-1]
        assert (found.ids_NLk[last] == routes[i][3]).all()


def test_a_turns_bytes_cover_every_token_that_is_computed():
    turn = a_turn(prompt=(1, 2, 3), sampled=(7, 9), routes=codec.encode(path_routes(4, 0), 8))
    assert codec.decode(turn.routes, experts=8, layers=2, top_k=3, tokens=4).shape == (4, 2, 3)
