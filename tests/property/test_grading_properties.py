"""Laws of what grading is made of: the price of effort, trees of values, filtering."""

import ast
import json
import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.grading.effort import EFFORTS, EffortConfig, effort_cost, effort_of, priced
from ostinato.worlds.grading.filtering import CountedSources, filter_changes
from ostinato.worlds.grading.inside.encoding import decode, encode
from ostinato.worlds.grading.test_report import same

X = st.floats(0, 1e9)
K = st.one_of(st.just(0.0), st.floats(1e-12, 1e3))
Q = st.one_of(
    st.just(1.0),
    st.floats(0, 4),
    st.integers(1, 16).map(lambda n: 1.0 + 10.0**-n),
    st.integers(1, 16).map(lambda n: 1.0 - 10.0**-n),
)


@given(X, K, Q)
def test_the_price_is_never_more_than_the_effort_and_never_negative(x, k, q):
    assert 0.0 <= effort_cost(x, k, q) <= x * (1 + 1e-12)


@given(st.floats(0.1, 1e6), st.floats(1e-6, 10), Q)
def test_the_price_is_the_area_under_the_price_of_a_unit(x, k, q):
    steps = 4000  # Simpson's rule in log space, of (1 + k t)^-q
    top = math.log1p(k * x)
    at = [top * i / steps for i in range(steps + 1)]
    values = [math.exp((1 - q) * u) / k for u in at]  # dt = e^u / k du
    area = (values[0] + values[-1] + 4 * math.fsum(values[1:-1:2]) + 2 * math.fsum(values[2:-1:2])) * top / steps / 3
    assert effort_cost(x, k, q) == pytest.approx(area, rel=1e-6)


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0, 2, 3]))
def test_the_formula_holds_exactly_for_whole_exponents(x, k, q):
    exact = (Fraction(1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert effort_cost(x, k, q) == pytest.approx(float(exact), rel=1e-13)


@given(st.floats(0, 1e6), st.floats(1e-6, 10))
def test_the_limit_at_one_is_a_logarithm_and_nothing_jumps_there(x, k):
    limit = math.log1p(k * x) / k
    assert effort_cost(x, k, 1.0) == pytest.approx(limit, rel=1e-14)
    for n in range(1, 17):
        slope = 1.0 + math.log1p(k * x)
        for q in (1.0 + 10.0**-n, 1.0 - 10.0**-n):
            assert effort_cost(x, k, q) == pytest.approx(
                limit, rel=2 * slope * 10.0**-n * math.exp(slope * 10.0**-n) + 1e-13
            )


@given(st.floats(0, 1e6), Q)
def test_the_limit_at_no_decay_is_the_effort_itself(x, q):
    assert effort_cost(x, 0.0, q) == x
    for k in (1e-15, 1e-30, 1e-305, 5e-324):
        assert effort_cost(x, k, q) == pytest.approx(x, rel=1e-8)


@given(X, X, K, Q)
def test_more_effort_never_costs_less_and_the_first_unit_costs_most(x, more, k, q):
    low, high = sorted((x, more))
    assert effort_cost(low, k, q) <= effort_cost(high, k, q) * (1 + 1e-12)
    together = effort_cost(low + high, k, q)
    assert together <= (effort_cost(low, k, q) + effort_cost(high, k, q)) * (1 + 1e-12)


@pytest.mark.parametrize("bad", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (math.nan, 1, 1), (math.inf, 1, 1)])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        effort_cost(*bad)


EFFORT = st.dictionaries(st.sampled_from([*EFFORTS, "seconds"]), st.floats(0, 1e6))


@given(EFFORT, EFFORT, st.floats(0, 0.99))
def test_solved_with_any_effort_beats_unsolved_and_less_effort_beats_more(effort, more, weight):
    config = EffortConfig(weight=weight)
    value, share = priced(1.0, effort, config)
    assert 0.0 <= share <= 1.0
    assert priced(0.0, effort, config)[0] == 0.0
    assert value > 0.0
    sum_of_both = {name: effort.get(name, 0.0) + more.get(name, 0.0) for name in EFFORTS}
    assert priced(1.0, sum_of_both, config)[0] <= value + 1e-12
    assert effort_of({"seconds": 5.0}, config) == 0.0


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.sets(st.binary()).map(frozenset)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_a_value_comes_back_from_its_tree(value):
    tree = json.loads(json.dumps(encode(value)))
    assert same(tree, encode(value))
    assert repr(encode(decode(tree))) == repr(encode(value))


@given(PLAIN, PLAIN)
def test_trees_are_the_same_exactly_if_their_values_are_equal(one, other):
    equal = one == other
    if "nan" not in repr((one, other)):
        assert same(encode(one), encode(other)) or not equal or isinstance(one, dict | set | frozenset | complex)
        assert not same(encode(one), encode(other)) or equal
    assert same(encode(one), encode(one))


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=20)
)
def test_no_json_breaks_the_comparison(sent):
    assert same(sent, sent)
    assert same(sent, ["f", "0x1p0"]) in (True, False)


def test_classes_of_ones_own_are_known_by_what_they_are():
    class Any(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

        def __repr__(self):
            return "9"

        def __add__(self, other):
            return 9

    assert not same(encode(Any(3)), encode(9))
    assert same(encode(Any(9)), encode(9))


NAMES = st.sampled_from(
    ["a", "calc.py", "conftest.py", "tests", "..", "x.pth", "pytest.py", "src", "test_a.py", "b.so", "", "."]
)
CHANGES = st.lists(
    st.builds(
        Change,
        path=st.lists(NAMES, min_size=1, max_size=3).map("/".join),
        kind=st.sampled_from(list(ChangeKind)),
        data=st.binary(max_size=8),
    )
)


@given(CHANGES)
def test_each_path_is_kept_or_left_out_with_a_reason_and_what_is_kept_is_a_source(changes):
    filtered = filter_changes(changes, CountedSources(roots=(".", "src")))
    kept, out = [each.path for each in filtered.kept], [each.path for each in filtered.left_out]
    assert sorted(kept + out) == sorted({change.path for change in changes})
    assert all(each.why for each in filtered.left_out)
    for path in kept:
        parts = path.split("/")
        assert path.endswith(".py")
        assert not {"..", ".", ""} & set(parts)
        assert "tests" not in parts[:-1]
        assert parts[-1] not in ("conftest.py", "test_a.py")
        assert path not in ("pytest.py", "src/pytest.py")
    assert filter_changes(filtered.kept, CountedSources(roots=(".", "src"))).kept == filtered.kept


@given(PLAIN)
def test_a_literal_of_source_is_the_value_that_it_writes(value):
    text = repr(value)
    assume(
        "-" not in text or "j" not in text
    )  # as source, "-0j" has another real part than the number that Python shows so
    if "nan" not in text and "inf" not in text and "frozenset" not in text and "set()" not in text:
        assert same(encode(ast.literal_eval(text)), encode(value))
