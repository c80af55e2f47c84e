"""Which dtype and how many threads are chosen is a function of measured speeds alone; what is measured is the model's own products."""

import itertools
import math

import pytest
import torch

from ostinato.model import speed
from ostinato.model.speed import FEW, MANY, MARGIN, MIN_SPEEDUP, Speed, Speeds, choose, is_whole, measure
from ostinato.testing.tiny import tiny_model


def product(gflops, dtype="bfloat16", *, rows=FEW, threads=1):
    return Speed(inputs=8, outputs=16, rows=rows, threads=threads, dtype=dtype, gflops=gflops)


def both(bf16, fp32=10.0, rows=FEW):
    return product(bf16, rows=rows), product(fp32, "float32", rows=rows)


def speeds(*dtypes, teams=(), load=0.0, cores=8):
    found = tuple(product(gflops, threads=count) for count, gflops in teams)
    return Speeds(dtypes=dtypes, teams=found, load=load, cores=cores)


@pytest.mark.parametrize(
    ("bf16", "dtype"),
    [(20.0, "bfloat16"), (10.0, "bfloat16"), (10.0 / MARGIN + 0.01, "bfloat16"), (10.0 / MARGIN - 0.01, "float32")],
)
def test_fp32_must_be_clearly_faster(bf16, dtype):
    found = choose(speeds(*both(bf16)))
    assert (found.dtype, found.bf16) == (dtype, pytest.approx(bf16 / 10.0))


def test_few_and_many_rows_count_alike():
    assert choose(speeds(*both(30.0), *both(5.0, rows=MANY))).dtype == "bfloat16"
    assert choose(speeds(*both(15.0), *both(5.0, rows=MANY))).dtype == "float32"


def test_threads_are_doubled_as_long_as_that_pays():
    def of(*teams, load=0.0):
        return choose(speeds(*both(10.0), teams=[(1, 10.0), *teams], load=load)).threads

    assert of() == of((2, 10.0 * MIN_SPEEDUP - 0.1)) == 1
    assert of((2, 10.0 * MIN_SPEEDUP)) == of((2, 18.0), (4, 18.0 * MIN_SPEEDUP - 0.1), (8, 80.0)) == 2
    assert of((2, 18.0), (4, 34.0), (8, 60.0)) == 8
    assert of((2, 18.0), load=4.1) == 1  # who knows what the others would have left


def test_without_speeds_it_is_what_is_published():
    found = choose(speeds())
    assert (found.dtype, found.threads, found.teams) == ("bfloat16", 1, {})


def test_kept_speeds_that_cannot_be_compared_are_known_for_it():
    assert is_whole(speeds())
    assert is_whole(speeds(*both(30.0), teams=[(1, 10.0), (2, 18.0)]))
    assert not is_whole(speeds(product(30.0)))
    assert not is_whole(speeds(*both(30.0), teams=[(2, 18.0)]))
    for gflops in (0.0, -1.0, math.inf, math.nan):
        assert not is_whole(speeds(*both(30.0, fp32=gflops)))
        assert not is_whole(speeds(*both(gflops)))


class Clock:
    """A clock that a call of a product moves on: by a second, or by `slow` in a dtype or with a number of threads."""

    def __init__(self, monkeypatch, slow):
        self.now, self.calls = 0.0, []
        real = speed._run

        def run(inputs, outputs, rows, dtype, pack):
            call, flops = real(inputs, outputs, rows, dtype, pack)

            def moved():
                call()
                self.calls.append((inputs, outputs, rows, dtype, torch.get_num_threads()))
                self.now += slow.get(dtype, 1.0) * slow.get(torch.get_num_threads(), 1.0)

            return moved, flops

        monkeypatch.setattr(speed, "_run", run)

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("speed") / "tiny", layers=1)


def test_the_models_products_are_timed_in_both_dtypes_and_with_more_threads(model, monkeypatch):
    clock = Clock(monkeypatch, {torch.bfloat16: 3.0, 2: 0.5, 4: 0.25})
    before = torch.get_num_threads()
    found = measure(model, None, 4, clock)
    assert torch.get_num_threads() == before
    assert {(each.rows, each.dtype, each.threads) for each in found.dtypes} == set(
        itertools.product((FEW, MANY), ("bfloat16", "float32"), (1,))
    )
    chosen = choose(Speeds(dtypes=found.dtypes, teams=found.teams, load=0.0, cores=4))
    assert chosen.dtype == "float32"
    assert chosen.bf16 == pytest.approx(1 / 3)
    assert chosen.teams == {2: pytest.approx(2.0), 4: pytest.approx(4.0)}
    assert {dtype for *_, dtype, threads in clock.calls if threads > 1} == {torch.float32}
    assert measure(model, None, 1, clock).teams == ()


def test_few_rows_are_multiplied_by_packed_matrices_of_the_models_shapes(model):
    packed = []
    measure(model, lambda layers: packed.append({tuple(each.weight.shape) for each in layers}), 1, iter_clock())
    shapes = {(each.outputs, each.inputs) for each in measure(model, None, 1, iter_clock()).dtypes}
    assert set().union(*packed) == shapes


def iter_clock():
    ticks = itertools.count()
    return lambda: float(next(ticks))
