"""Our own matrix products: the bits of their definition and of a real tile unit, at any number of rows, threads and widths."""

from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from numba import njit

from ostinato.model import linear as page
from ostinato.model.cpu import team
from ostinato.model.kernels import tiles
from ostinato.model.kernels.product import BLOCK, FUSED, PAIRS, flush_small, panel_sums, restore
from ostinato.model.kernels.vector import PANEL
from ostinato.model.linear import PanelLinear, in_panels, linear, multiply, possible_orders, use_order

GOLDEN = Path(__file__).parent / "tile_products.npz"
"""Inputs, and the results of an Intel CPU's tile unit (AMX): normal, cancelling, huge, subnormal, infinite and NaN numbers."""
CASES = sorted({name.rsplit("_", 2)[0] for name in np.load(GOLDEN).files})


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setattr(page, "_order", "blocks")


def small_as_zero(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x).astype(np.float32)


def fused(a, b, c):
    """Fused multiply-add on fp32: the product is exact in 64 bits, and so is the sum up to a last bit that is made odd (Boldo 2008)."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c.astype(np.float64)
    rest = (product - (total - (total - product))) + (c.astype(np.float64) - (total - product))
    odd = (total.view(np.int64) & 1) == 1
    toward = np.where(rest > 0, np.inf, -np.inf)
    return np.where((rest != 0) & ~odd, np.nextafter(total, toward), total).astype(np.float32)


def by_definition(x, weight):
    """The order of additions, written out in numpy."""
    x, weight = (small_as_zero(np.pad(each, ((0, 0), (0, -each.shape[1] % BLOCK)))) for each in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], BLOCK):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(first, first + BLOCK):
            a, b = np.broadcast_arrays(x[:, None, k], weight[None, :, k])
            chains[k % 2] = small_as_zero(fused(a, b, chains[k % 2]))
        total = small_as_zero(total + small_as_zero(chains[0] + chains[1]))
    return total


def drawn(rows, columns, dtype, seed, cancelling=False):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if cancelling:
        x[:, 1::2] = -x[:, : x.shape[1] // 2 * 2 : 2]
        x[:, ::16] *= 1 + 2.0**-6
    return x


@pytest.mark.parametrize("case", CASES)
def test_fused_multiply_adds_give_the_bits_of_a_tile_unit(case):
    x, weight, want = (np.load(GOLDEN)[f"{case}_{part}"] for part in ("x_MK", "w_NK", "y_MN"))
    panels = in_panels(torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16))
    rows = np.ascontiguousarray((x.astype(np.uint32) << 16).view(np.float32))
    got = sums_of(rows, panels, FUSED)[:, : len(weight)]
    assert np.array_equal(got.view(np.uint32), want)


def sums_of(x_MK, panels, how):
    """The fp32 sums before they are rounded; in line already."""
    rows, inputs = x_MK.shape
    out, wide = [], np.empty((8 * BLOCK, PANEL), np.float32)
    for panel in range(len(panels.words)):
        sums = np.empty((rows, PANEL), np.float32)
        at = panels.address + panel * panels.words[0].nbytes
        panel_sums(
            x_MK.ctypes.data,
            x_MK.strides[0],
            rows,
            at,
            inputs,
            how,
            panels.dtype == torch.bfloat16,
            sums,
            wide,
        )
        out.append(sums)
    return np.concatenate(out, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (576, 48), (75, 7), (1, 1)])
def test_a_product_is_its_definition_at_any_number_of_rows_and_threads(dtype, inputs, outputs):
    weight, x = drawn(outputs, inputs, dtype, 1), drawn(61, inputs, dtype, 2, cancelling=True)
    weight[:, 1::2] = weight[:, : inputs // 2 * 2 : 2]
    bias = drawn(1, outputs, dtype, 3)[0]
    sums = by_definition(x.float().numpy(), weight.float().numpy())
    want, biased = torch.from_numpy(sums).to(dtype), torch.from_numpy(sums + bias.float().numpy()).to(dtype)
    panels = in_panels(weight)
    for threads in (1, 2, 4):
        with team(threads):
            for rows in (1, 2, 3, 5, 6, 7, 23, 24, 61):
                assert torch.equal(multiply(x[:rows], panels), want[:rows]), (threads, rows)
            assert torch.equal(multiply(x, panels, bias), biased)
    assert torch.equal(linear(x, weight, bias), biased)


def test_rows_beyond_one_piece_of_work_are_the_same_rows():
    weight, x = drawn(40, 1600, torch.bfloat16, 1), drawn(450, 1600, torch.bfloat16, 2)
    panels = in_panels(weight)
    whole = multiply(x, panels)
    assert torch.equal(whole[440:], multiply(x[440:], panels))
    assert torch.equal(whole[:3], multiply(x[:3], panels))


def test_outputs_may_be_divided_and_the_bits_stay():
    x, weight = torch.randn(64, 700), torch.randn(96, 700)
    whole = linear(x, weight)
    assert torch.equal(torch.cat([linear(x, part) for part in weight.split([32, 15, 49])], -1), whole)


def test_no_rows_give_no_rows():
    assert linear(torch.empty(0, 64), torch.ones(5, 64)).shape == (0, 5)


def test_a_panel_of_two_weights_holds_half_of_each():
    gate, up = torch.arange(2 * 64 * 32).view(2, 64, 32).bfloat16()
    both = in_panels(gate, up).words
    assert torch.equal(both[:2], in_panels(torch.cat([gate[:16], up[:16], gate[16:32], up[16:32]])).words)


def test_small_numbers_count_again_after_a_product():
    small = torch.full((4,), 2.0**-130)
    linear(torch.ones(3, 64), torch.ones(8, 64))
    assert (small + small != 0).all()


def test_the_state_of_small_numbers_is_given_back():
    @njit
    def there_and_back():
        first = flush_small()
        second = flush_small()
        restore(first)
        third = flush_small()
        restore(third)
        return first, second, third

    first, second, third = there_and_back()
    assert first == third != second


def test_layers_in_panels_are_the_layers_beside_each_other():
    layers = [torch.nn.Linear(70, outputs) for outputs in (5, 40)]
    x = torch.randn(2, 9, 70)
    with torch.inference_mode():
        got = PanelLinear(layers)(x)
        assert torch.equal(got, torch.cat([linear(x, layer.weight, layer.bias) for layer in layers], -1))
    with pytest.raises(ValueError, match="cannot be one"):
        PanelLinear([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4, bias=False)])


def test_an_order_that_the_cpu_cannot_compute_is_refused():
    assert "blocks" in possible_orders()
    if "pairs" in possible_orders():
        use_order("pairs")
        assert page.how_multiplied(torch.bfloat16) == PAIRS
        assert page.how_multiplied(torch.float32) == FUSED
    else:
        with pytest.raises(page.BadConfig, match=r"model\.order"):
            use_order("pairs")


# ---------------------------------------------------------------- tiles


class TileUnit:
    """A tile unit in software: eight tiles of sixteen rows of 64 bytes, with the sizes that were configured."""

    def __init__(self):
        self.tiles, self.rows = np.zeros((8, 16, 64), np.uint8), None
        self.released = 0

    def configure(self, address):
        config = np.frombuffer(memory(address, 64), np.uint8)
        assert config[0] == 1
        assert (config[16:32].view(np.uint16) == 64).all()
        self.rows = config[48:56].tolist()
        assert all(1 <= rows <= 16 for rows in self.rows)

    def release(self):
        self.rows, self.released = None, self.released + 1

    def zero(self, tile):
        self.tiles[tile] = 0

    def load(self, tile):
        def load(address, step):
            for row in range(self.rows[tile]):
                self.tiles[tile, row] = np.frombuffer(memory(address + row * step, 64), np.uint8)

        return load

    def store(self, tile):
        def store(address, step):
            for row in range(self.rows[tile]):
                memory(address + row * step, 64)[:] = self.tiles[tile, row].tobytes()

        return store

    def dot(self, total, left, right):
        def dot():
            rows = self.rows[left]
            x = floats(self.tiles[left, :rows]).reshape(rows, 32)
            pairs = floats(self.tiles[right]).reshape(16, 16, 2)  # pair, output, even or odd
            before = self.tiles[total].view(np.float32)[:rows]
            added = by_definition(x, pairs.transpose(1, 0, 2).reshape(16, 32))
            self.tiles[total].view(np.float32)[:rows] = small_as_zero(before + added)

        return dot

    def dot_bytes(self, total, left, right):
        def dot():
            rows = self.rows[left]
            x = self.tiles[left, :rows].astype(int)
            fours = self.tiles[right].view(np.int8).reshape(16, 16, 4).astype(int)  # four of inputs, output, which
            before = self.tiles[total].view(np.int32)[:rows]
            self.tiles[total].view(np.int32)[:rows] = before + x @ fours.transpose(1, 0, 2).reshape(16, 64).T

        return dot


def memory(address, size):
    import ctypes

    return (ctypes.c_ubyte * size).from_address(int(address))


def floats(tile):
    return (tile.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def in_software(unit):
    """The kernel's own code, over operations in software."""
    names = {f"_load{i}": unit.load(i) for i in (4, 5, 6, 7)} | {f"_store{i}": unit.store(i) for i in range(4)}
    names |= {f"_zero{i}": lambda i=i: unit.zero(i) for i in range(4)}
    for a, b, c in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
        names |= {f"_dot{a}{b}{c}": unit.dot(a, b, c), f"_bytes{a}{b}{c}": unit.dot_bytes(a, b, c)}
    names |= {"_configure": unit.configure, "_release": unit.release, "_fetch": lambda address: None}
    names |= {"_shape": tiles._shape.py_func}
    return FunctionType(tiles.by_tiles.__code__, vars(tiles) | names)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 49])
def test_the_tile_kernel_gives_the_bits_of_the_definition(rows):
    """On every CPU: its addresses, sizes and order, with the tile unit in software."""
    weight, x = drawn(PANEL, 96, torch.bfloat16, 1), drawn(rows, 96, torch.bfloat16, rows)
    panels, sums = in_panels(weight), np.full((rows + 1, PANEL), 7, np.float32)
    words, unit = x.view(torch.int16).numpy(), TileUnit()
    in_software(unit)(words.ctypes.data, words.strides[0], rows, panels.address, 96 // BLOCK, sums, False)
    assert np.array_equal(sums[:rows], by_definition(x.float().numpy(), weight.float().numpy()))
    assert (sums[rows] == 7).all(), "it wrote beyond its rows"
    assert unit.released == 1, "tiles that are not released are saved at every switch of threads"


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 49])
def test_the_tile_kernel_sums_bytes_exactly(rows):
    draw = np.random.default_rng(rows)
    x, weight = draw.integers(0, 256, (rows, 128)), draw.integers(-128, 128, (PANEL, 128))
    levels, unit = x.astype(np.uint8), TileUnit()
    words = np.ascontiguousarray(weight.astype(np.int8).view(np.int32).T)
    sums = np.full((rows + 1, PANEL), 7, np.int32)
    in_software(unit)(levels.ctypes.data, levels.strides[0], rows, words.ctypes.data, 2, sums, True)
    assert np.array_equal(sums[:rows], x @ weight.T)
    assert (sums[rows] == 7).all(), "it wrote beyond its rows"
    assert unit.released == 1


@pytest.mark.skipif(not page.tiles_allowed(), reason="this CPU has no tiles (AMX), or the system does not allow them")
def test_tiles_and_fused_multiply_adds_agree(monkeypatch):
    weight, x = drawn(96, 1536, torch.bfloat16, 1), drawn(450, 1536, torch.bfloat16, 2)
    panels = in_panels(weight)
    by_tiles = multiply(x, panels)
    monkeypatch.setattr(page, "how_multiplied", lambda dtype: FUSED)
    assert torch.equal(multiply(x, panels), by_tiles)
