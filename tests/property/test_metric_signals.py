"""What a turn is worth does not depend on the order in which its signals came, nor on what came too late."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.core.records import Signal, Source
from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.facts import TurnSignals
from ostinato.release.metrics.metric import Metric

ACCEPTANCE = Metric.of(MetricConfig(name="acceptance"), 0.02)
STARS = Metric.of(MetricConfig(name="stars", numerator=("stars",), most=5.0), 0.02)
CUT = 50.0


@st.composite
def histories(draw):
    """Signals about one turn as they were sent, some taken back; ids are unique."""
    sent, count = [], draw(st.integers(0, 8))
    for n in range(count):
        received = draw(st.floats(0, 100))
        sent.append(
            signal(
                f"s{n}",
                draw(st.sampled_from(["accepted", "rejected", "undone", "stars"])),
                draw(st.sampled_from([-1.0, 0.0, 1.0, 3.0, 5.0])),
                occurred=draw(st.integers(0, 3)),
                received=received,
            )
        )
        if draw(st.booleans()):
            late = draw(st.floats(0, 100))
            sent.append(signal(f"r{n}", "sorry", 0.0, received=late, retracts=f"s{n}"))
    return sent


def signal(id, name, value, *, occurred=0.0, received=0.0, retracts=None):
    return Signal(
        id=id, turn="t", name=name, value=value, source=Source.HUMAN, occurred_at=float(occurred), received_at=received, retracts=retracts
    )  # fmt: skip


def heard(signals):
    said = TurnSignals()
    for each in signals:
        said.hear(each)
    return said


def worth(signals, until=CUT):
    values = heard(signals).values(until)
    return ACCEPTANCE.measure(values), STARS.measure(values)


@given(histories().flatmap(lambda sent: st.tuples(st.just(sent), st.permutations(sent))))
def test_in_any_order_and_however_often(pair):
    sent, shuffled = pair
    assert worth(shuffled) == worth(sent)
    assert worth([*shuffled, *sent]) == worth(sent)


@given(histories())
def test_what_is_received_after_the_cut_changes_nothing(sent):
    assert worth(sent) == worth([each for each in sent if each.received_at <= CUT])


@given(histories())
def test_what_was_taken_back_in_time_was_never_said(sent):
    gone = {each.retracts for each in sent if each.retracts and each.received_at <= CUT}
    assert worth(sent) == worth([each for each in sent if each.id not in gone and each.retracts is None])


@given(histories(), st.sampled_from([0.0, 2.0, 4.0]))
def test_a_changed_value_replaces_the_one_before(sent, value):
    changed = signal("later", "stars", value, occurred=9, received=CUT)
    assert worth([*sent, changed])[1] == worth([changed, *sent])[1] == (value / 5.0, 1.0)
    assert worth([*sent, changed, signal("r", "sorry", 0.0, received=CUT, retracts="later")]) == worth(sent)


def test_what_comes_together_from_a_clock_that_is_ahead_keeps_its_order():
    first, then = (
        signal("b", "stars", 1.0, occurred=3_600, received=1.0),
        signal("a", "stars", 5.0, occurred=3_603, received=1.0),
    )
    assert worth([first, then])[1] == worth([then, first])[1] == (1.0, 1.0)


def test_a_clock_that_is_ahead_puts_nothing_last():
    first, then = (
        signal("a", "stars", 5.0, occurred=3_600, received=1.0),
        signal("b", "stars", 1.0, occurred=2, received=2.5),
    )
    assert worth([first, then])[1] == worth([then, first])[1] == (0.2, 1.0)


def test_what_is_no_number_is_not_heard():
    assert heard([signal("a", "stars", float("nan"))]).values() == {}
    assert STARS.measure(heard([signal("a", "stars", float("inf"))]).values()) == (1.0, 1.0)
