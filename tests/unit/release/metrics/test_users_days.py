"""Which users come back: one row per user and day, days without a visit included."""

import pytest

from ostinato.release.metrics.config import MetricConfig
from ostinato.release.metrics.facts import USER_FACTS
from ostinato.release.metrics.metric import Metric, Past
from ostinato.release.metrics.retention import DAY, Retention

ANN, BOB = ("acme", "ann"), ("acme", "bob")
BEGAN = 1_764_418_411.123456


def seen(*visits):
    retention = Retention(BEGAN)
    for person, days in visits:
        retention.see(person, BEGAN + days * DAY)
    return retention


def test_who_stays_away_is_a_row_and_who_comes_first_that_day_is_none():
    retention = seen((ANN, 0.1), (ANN, 0.11), (BOB, 0.2), (ANN, 1.0), (ANN, 1.01), (ANN, 1.9), (("acme", "new"), 1.5))
    rows = dict(retention.rows(1))
    assert set(rows) == {ANN, BOB}
    assert set(rows[ANN]) == set(USER_FACTS)
    assert rows[ANN] == {
        "user": 1.0,
        "user.returned": 1.0,
        "user.log_turns": pytest.approx(1.3863, abs=1e-4),
        "user.sessions": 2.0,
        "user.days_away": 0.0,
    }
    assert rows[BOB] == dict.fromkeys(rows[BOB], 0.0) | {"user": 1.0, "user.days_away": 1.0}
    assert dict(retention.rows(0)) == {}


def test_rows_arrive_in_any_order():
    visits = [(ANN, 0.1), (BOB, 0.2), (ANN, 1.2), (BOB, 2.3), (ANN, 2.9)]
    assert [dict(seen(*visits).rows(d)) for d in (1, 2)] == [dict(seen(*visits[::-1]).rows(d)) for d in (1, 2)]


def test_a_user_counts_for_a_week_after_a_visit_and_is_forgotten_then():
    retention = seen((ANN, 0.5))
    away = [dict(retention.rows(day)).get(ANN, {}).get("user.days_away") for day in range(1, 10)]
    assert away == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, None, None]
    retention.forget(7)
    assert retention._people
    retention.forget(8)
    assert not retention._people


def test_a_quarter_of_a_year_takes_no_more_memory_than_a_week():
    retention = Retention(BEGAN)
    for day in range(90):
        for user in range(20):
            retention.see(("acme", f"{day}-{user}"), BEGAN + (day + 0.5) * DAY)
            retention.see(("acme", f"regular-{user}"), BEGAN + (day + 0.5) * DAY)
        retention.forget(day + 1)
    assert len(retention._people) == 20 * 7 + 20
    assert max(map(len, retention._people.values())) == 8


def test_a_persons_own_habit_in_the_week_before_is_what_is_expected():
    returned = Metric.of(MetricConfig(name="returned"), 0.02)
    assert returned.daily
    past = Past((returned,), until=BEGAN)
    for day in range(-7, 0):
        past.remember(ANN, BEGAN + (day + 0.5) * DAY, {})
    past.remember(BOB, BEGAN - 6.5 * DAY, {})
    expected = past.expected()
    assert expected.usual_M == (0.5,), "six days with a visit of twelve"
    assert expected.of(ANN)[0] == pytest.approx((6 + 3) / 12)
    assert expected.of(BOB)[0] == pytest.approx(3 / 12)


def test_other_facts_of_days_are_measured_in_their_own_units():
    turns = Metric.of(MetricConfig(name="turns_per_user"), 0.02)
    away = Metric.of(MetricConfig(name="days_to_return"), 0.02)
    assert turns.measure({"user": 1.0, "user.log_turns": 3.0}) == (0.5, 1.0)
    assert away.measure({"user": 1.0, "user.days_away": 7.0}) == (1.0, 1.0)
    assert away.sign == -1
    assert turns.measure({"turn": 1.0, "accepted": 1.0}) is None
    assert not Metric.of(MetricConfig(name="acceptance"), 0.02).daily


@pytest.mark.parametrize("fields", [{"numerator": ("user.returned", "accepted")}, {"denominator": ("turn",)}])
def test_facts_of_days_and_of_turns_do_not_mix(fields):
    with pytest.raises(ValueError, match="is a fact of a user's day"):
        MetricConfig(name="returned", **fields)


def test_a_quantile_of_days_is_refused():
    with pytest.raises(ValueError, match="and no quantile"):
        MetricConfig(name="mine", numerator=("user.sessions",), quantile=0.5)
