"""What a declared metric makes of one turn, and which declarations are refused."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.records import Finish, ParsedCall
from ostinato.release.config import ReleaseConfig
from ostinato.release.metrics.config import BUILT_IN, DEFAULT_GUARDRAILS, DEFAULT_METRICS, MetricConfig, completed
from ostinato.release.metrics.facts import MEANINGS, Term, facts_of, parse_term
from ostinato.release.metrics.metric import Metric, metrics_of
from ostinato.testing.records import a_turn


def metric(name, **fields):
    return Metric.of(MetricConfig(name=name, **fields), 0.02)


@pytest.mark.parametrize(
    ("known", "measured"),
    [
        ({}, None),
        ({"turn.stopped": 0.0}, None),
        ({"accepted": 1.0}, (1.0, 1.0)),
        ({"accepted": 0.0}, (0.0, 1.0)),
        ({"accepted": -1.0}, (0.0, 1.0)),
        ({"rejected": 1.0}, (0.0, 1.0)),
        ({"undone": 0.0}, None),
        ({"accepted": 1.0, "undone": 1.0}, (0.0, 1.0)),
        ({"accepted": 1.0, "undone": 0.0}, (1.0, 1.0)),
        ({"turn.stopped": 1.0}, (0.0, 1.0)),
        ({"something_else": 1.0}, None),
    ],
)
def test_acceptance(known, measured):
    assert metric("acceptance").measure(known) == measured


@pytest.mark.parametrize(
    ("name", "known", "measured"),
    [
        ("edit_survival", {"survived": 0.4}, (0.4, 1.0)),
        ("edit_survival", {"survived": 0.4, "undone": 1.0}, (0.0, 1.0)),
        ("edit_survival", {}, None),
        ("dissatisfied_follow_up", {"turn": 1.0}, (0.0, 1.0)),
        ("dissatisfied_follow_up", {"turn": 1.0, "dissatisfied": 0.0}, (0.0, 1.0)),
        ("dissatisfied_follow_up", {"turn": 1.0, "dissatisfied": 1.0}, (1.0, 1.0)),
        ("stopped", {"turn.stopped": 0.0}, (0.0, 1.0)),
        ("stopped", {"turn.stopped": 0.0, "stopped": 1.0}, (1.0, 1.0)),
        ("tool_error", {}, None),
        ("tool_error", {"turn.broken_tool_calls": 0.5}, (1.0, 1.0)),
        ("tool_error", {"turn.broken_tool_calls": 0.0, "tool_error": 1.0}, (1.0, 1.0)),
        ("tool_error", {"tool_error": 0.0}, (0.0, 1.0)),
        ("suggestions_shown", {"turn.suggests": 1.0}, (1.0, 1.0)),
        ("feedback_coverage", {"turn.heard": 0.0}, (0.0, 1.0)),
        ("accepted_of_all", {"turn": 1.0}, (0.0, 1.0)),
        ("accepted_of_all", {"turn": 1.0, "accepted": 1.0}, (1.0, 1.0)),
        ("accepted_of_all", {"turn": 1.0, "accepted": 1.0, "undone": 1.0}, (0.0, 1.0)),
    ],
)
def test_the_other_built_in_ones(name, known, measured):
    assert metric(name).measure(known) == measured


def test_a_quantile_counts_what_is_above_where_it_lay_before():
    slow = metric("latency_p99")
    assert slow.measure({"turn.latency": 4.0}) is None, "nobody knows yet what is slow"
    assert [slow.measure({"turn.latency": seconds}, 3.0) for seconds in (2.0, 3.0, 3.1)] == [
        (0.0, 1.0),
        (0.0, 1.0),
        (1.0, 1.0),
    ]
    assert slow.measure({}, 3.0) is None


def test_values_are_averaged_up_to_the_most_that_counts():
    stars = metric("stars", numerator=("stars",), most=5.0)
    assert [stars.measure({"stars": value}) for value in (4.0, 1e9, -3.0)] == [(0.8, 1.0), (1.0, 1.0), (0.0, 1.0)]
    assert stars.tolerance == 0.0
    assert metric("stars", numerator=("stars",), most=5.0, role="goal", tolerance=0.2).tolerance == 0.2


def test_a_denominator_may_be_a_count_and_no_turn_gains_more_than_it_counts():
    taken = metric("taken", numerator=("taken",), denominator=("shown",))
    assert taken.measure({"taken": 2.0, "shown": 3.0}) == (2.0, 3.0)
    assert taken.measure({"taken": 9.0, "shown": 3.0}) == (3.0, 3.0)
    assert taken.measure({"shown": 3.0}) == (0.0, 3.0)
    assert taken.measure({"taken": 2.0}) is None
    assert taken.measure({"taken": 2.0, "shown": 0.0}) is None


def test_a_threshold_makes_yes_or_no_of_a_value_and_the_largest_term_counts():
    good = metric("good", numerator=("stars >= 4", "thumbs"))
    assert [good.measure({"stars": value}) for value in (3.9, 4.0)] == [(0.0, 1.0), (1.0, 1.0)]
    assert good.measure({"stars": 1.0, "thumbs": 1.0}) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("accepted", Term(name="accepted", comparison=None, bound=0.0)),
        (" stars>=4 ", Term(name="stars", comparison=">=", bound=4.0)),
        ("turn.latency > 0.5", Term(name="turn.latency", comparison=">", bound=0.5)),
        ("Thumbs-Up:v2 < -1", Term(name="Thumbs-Up:v2", comparison="<", bound=-1.0)),
    ],
)
def test_terms(text, term):
    assert parse_term(text) == term


@pytest.mark.parametrize("text", ["", "two words", "stars > many", "stars => 4", "4 < stars", "stars >"])
def test_what_is_no_term_is_refused(text):
    with pytest.raises(ValueError, match="is not a term"):
        parse_term(text)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (Finish.STOP, {"turn": 1.0, "turn.failed": 0.0, "turn.stopped": 0.0, "turn.latency": 1.0, "turn.suggests": 1.0}),
        (Finish.ABORT, {"turn": 1.0, "turn.failed": 0.0, "turn.stopped": 1.0, "turn.latency": 1.0, "turn.suggests": 1.0}),
        (Finish.ERROR, {"turn": 1.0, "turn.failed": 1.0, "turn.stopped": 0.0}),
    ],
)  # fmt: skip
def test_facts_of_a_turn(finish, expected):
    assert facts_of(a_turn(finish=finish), expected.keys() | {"turn.latency", "turn.suggests"}, "-") == expected


def test_a_fact_that_a_turn_says_nothing_about_is_not_there():
    wanted = set(MEANINGS)
    assert "turn.broken_tool_calls" not in facts_of(a_turn(), wanted, "-")
    broken = replace(a_turn(), text="<tool_call>{</tool_call>", calls=(ParsedCall(name="", start=0, end=24),))
    assert facts_of(broken, wanted, "-")["turn.broken_tool_calls"] == 1.0
    assert "turn.broken_tool_calls" not in facts_of(replace(broken, calls=None), wanted, "-"), "calls are not known"
    assert [
        facts_of(replace(a_turn(), text=text), wanted, "none")["turn.suggests"] for text in (" none\n", "", "-")
    ] == [0.0, 0.0, 1.0]
    erased = replace(a_turn(), text="", sampled_ids=(), logprobs=())
    assert "turn.suggests" not in facts_of(erased, wanted, "-")


def test_without_a_declaration_acceptance_is_the_goal_and_the_guardrails_stand():
    assert [(each.name, each.role) for each in DEFAULT_METRICS] == [
        ("acceptance", "goal"),
        *((name, "guardrail") for name in DEFAULT_GUARDRAILS),
    ]
    assert ReleaseConfig().metrics == DEFAULT_METRICS


def test_a_goal_of_ones_own_takes_the_place_of_acceptance_and_the_guardrails_stay():
    own = MetricConfig(name="kept", role="goal", numerator=("still_there > 0",), unless=("undone",))
    assert [each.name for each in completed([own], ())] == ["kept", *DEFAULT_GUARDRAILS]
    both = completed([own, MetricConfig(name="acceptance")], ())
    assert [each.name for each in both if each.role == "goal"] == ["kept", "acceptance"]


def test_a_declaration_of_a_built_in_name_changes_only_what_it_says():
    (changed,) = [
        each
        for each in completed([MetricConfig(name="latency_p99", tolerance=0.05, role="diagnostic")], ())
        if each.name == "latency_p99"
    ]
    assert (changed.tolerance, changed.role, changed.quantile) == (0.05, "diagnostic", 0.99)
    assert completed(DEFAULT_METRICS, ()) == DEFAULT_METRICS, "what was completed once stays as it is"


def test_goals_come_first():
    declared = completed([MetricConfig(name="tool_error"), MetricConfig(name="acceptance")], ())
    assert [each.name for each in metrics_of(declared, 0.02)] == ["acceptance", "tool_error", *DEFAULT_GUARDRAILS]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_metric_can_be_named_without_declaring_it(name):
    found = {each.name: each for each in ReleaseConfig(metrics=({"name": name},)).metrics}
    assert found[name].numerator


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[{name='aceptance'}]", "release.metrics.0: there is no built-in metric 'aceptance'; did you mean 'acceptance'?"),
        ("[{name='kept', numerator=['stil_there']}]", "'kept', numerator: no signal 'stil_there' is known; did you mean 'still_there'?"),
        ("[{name='edit_survival', unless=['undome']}]", "'edit_survival', unless: no signal 'undome' is known; did you mean 'undone'?"),
        ("[{name='slow', numerator=['turn.latncy']}]", "no fact 'turn.latncy' of a turn; did you mean 'turn.latency'?"),
        ("[{name='slow', numerator=['a b']}]", "release.metrics.0.numerator: 'a b' is not a term"),
        ("[{name='acceptance', numerator=[]}]", "a metric needs a numerator"),
        ("[{name='acceptance', role='guardrail'}]", "no metric has the role 'goal'"),
        ("[{name='acceptance'}, {name='acceptance'}]", "two metrics are named 'acceptance'"),
        ("[{name='latency_p50', most=9.0}]", "with a quantile each turn counts as one"),
        ("[{name='kept', role='goal', numerator=['kept'], most=2000.0}]", "needs a tolerance, in its own units"),
        ("[{name='acceptance', tolerence=0.1}]", "unknown key 'release.metrics.0.tolerence'"),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_meant_is_an_error_with_the_way_out(given, said):
    with pytest.raises(BadConfig) as caught:
        load(None, [f"release.metrics={given}"])
    assert said in str(caught.value)


def test_signals_of_ones_own_are_listed_first():
    own = {"name": "kept", "role": "goal", "numerator": ("thumbs-up",)}
    with pytest.raises(ValidationError, match=r"list signals of your own in release\.signals"):
        ReleaseConfig(metrics=(own,))
    assert ReleaseConfig(signals=("thumbs-up",), metrics=(own,)).metrics[0].name == "kept"
