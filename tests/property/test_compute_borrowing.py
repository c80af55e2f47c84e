"""Whatever the guard sees: it lends within what is free and of use, gives back no more than is lent, and leaves users what they need."""

import math

from benchmarks.compute.lending_simulation import moved
from hypothesis import given
from hypothesis import strategies as st

from ostinato.compute.borrowing import FleetView, GuardRules, lending
from ostinato.compute.ledger import ShareRules

GUARD = GuardRules()
counts = st.integers(0, 200)
rates = st.floats(0, 2000)


@given(
    serving=counts,
    returning=counts,
    lent=counts,
    rate=rates,
    more=rates,
    delay=st.floats(0, 5),
    since=st.floats(0, 1e5),
    wanted=counts,
)
def test_lending_keeps_its_bounds(serving, returning, lent, rate, more, delay, since, wanted):
    seen = FleetView(
        serving=serving,
        returning=returning,
        lent=lent,
        rate=rate,
        highest=rate + more,
        delay_s=delay,
        carries=5.0,
        since_s=since,
    )
    change = lending(GUARD, seen, wanted)
    assert -lent <= change <= GUARD.most
    if change > 0:
        assert lent + change <= wanted
        assert serving - change >= math.ceil((rate + more) / (5.0 * GUARD.lend_below))
        assert delay <= GUARD.guard_s
        assert since >= GUARD.hold_s
    if delay > GUARD.guard_s:
        assert change == -lent


@given(
    workers=st.integers(1, 200),
    sampling=counts,
    borrowed=st.floats(0, 300),
    observed=st.floats(0, 1),
    share=st.floats(0.01, 0.99),
)
def test_moves_are_bounded_and_leave_no_fewer_than_none(workers, sampling, borrowed, observed, share):
    sampling = min(sampling, workers)
    change = moved(ShareRules(share=share), workers, sampling, borrowed, observed)
    assert abs(change) <= ShareRules().moves
    assert 0 <= sampling + change <= workers
