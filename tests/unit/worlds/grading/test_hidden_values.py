"""What is left in a test of what it expects: nothing that can be sealed."""

import contextlib
import random
import re

import pytest
import regex

from ostinato.worlds.grading import test_report
from ostinato.worlds.grading.hidden_values import Claim, seal
from ostinato.worlds.grading.test_report import holds, passes, read_testimony

SECRET = "73519"


def sealed(body, head="import pytest\n", **settings):
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return seal(f"{head}def test_it():\n{lines}", witness="_w", drawn=random.Random(1), **settings)


@pytest.mark.parametrize(
    "body",
    [
        f"assert f(3) == {SECRET}",
        f"assert {SECRET} == f(3)",
        f"assert f(3) == [{SECRET}, {{'a': ({SECRET},)}}] and g()",
        f"assert f(3) == '{SECRET}', 'said {SECRET}'",
        f"assert f(3) == pytest.approx({SECRET}, rel={SECRET})",
        f"expected = {SECRET}\nassert f(3) == expected",
        f"expected = [{SECRET}]\nfor x in range(3):\n    assert f(x) == expected",
        f"self.assertEqual(f(3), {SECRET})",
        f"with pytest.raises(E{SECRET}):\n    f(3)",
        f"with pytest.raises((KeyError, E{SECRET}), match='{SECRET}') as e:\n    f(3)",
        f"with self.assertRaisesRegex(ValueError, '{SECRET}'):\n    f(3)",
    ],
)
def test_an_expectation_leaves_the_source(body):
    tests = sealed(body)
    assert SECRET not in tests.text
    assert tests.sites
    assert all(site.claim in (Claim.EQUAL, Claim.RAISES, Claim.TRUTH) for site in tests.sites.values())


@pytest.mark.parametrize(
    "rows",
    [
        f"[(1, {SECRET}), (2, {SECRET})]",
        f"[pytest.param(1, {SECRET}, id='a'), (2, f({SECRET}))]",
        f"([1, [{SECRET}]],)",
    ],
)
def test_expected_values_leave_parameters(rows):
    source = f"import pytest\n@pytest.mark.parametrize('x, y', {rows})\ndef test_it(x, y):\n    assert f(x) == y\n"
    tests = seal(source, witness="_w", drawn=random.Random(1))
    assert SECRET not in tests.text
    assert SECRET in seal(source, witness="_w", drawn=random.Random(1), names=False).text
    assert SECRET in seal(source, witness="_w", drawn=random.Random(1), open_places={(4, 11)}).text


@pytest.mark.parametrize(
    "body",
    [
        f"expected = {SECRET}\nassert f(expected) == expected",  # also an input
        f"expected = {SECRET}\nassert f(3) < expected",
        f"x = {SECRET}\ny = f(3)\nassert x == y",  # which of the two is expected?
        f"assert f({SECRET}) == 3",
    ],
)
def test_what_is_an_input_stays(body):
    assert SECRET in sealed(body).text


def test_truths_are_negated_by_a_draw():
    source = "def test_it():\n" + "    assert f(3) > 2\n" * 64
    tests = seal(source, witness="_w", drawn=random.Random(1))
    flipped = [site.flipped for site in tests.sites.values()]
    assert 16 < sum(flipped) < 48
    assert tests.text.count("not f(3) > 2") == sum(flipped)
    other = seal(source, witness="_w", drawn=random.Random(2))
    assert not set(tests.sites) & set(other.sites)


def test_an_open_claim_is_left_as_it_stands():
    assert "assert f(3) == 9" in sealed("assert f(3) == 9", open_places={(3, 11)}).text


def test_a_sealed_file_can_be_compiled_and_begins_with_what_must_come_first():
    tests = seal(
        '"""Doc."""\nfrom __future__ import annotations\nimport os\nassert os\n', witness="_w", drawn=random.Random(1)
    )
    compile(tests.text, "t", "exec")
    assert tests.text.index("__future__") < tests.text.index("import _w as _witness") < tests.text.index("import os")


def lines(*events):
    import json

    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def heard(body, *shown, failed=False):
    tests = sealed(body)
    keys = list(tests.sites)
    events = [["saw", keys[i], *each] for i, each in enumerate(shown)]
    sent = lines(["collected", ["t"]], ["start", "t"], *events, *([["failed", "t"]] if failed else []), ["end", "t"])
    return read_testimony(sent, {key: ("t.py", site) for key, site in tests.sites.items()}).tests["t"]


@pytest.mark.parametrize(
    ("body", "shown", "passed"),
    [
        ("assert f() == 9", ["value", 9], True),
        ("assert f() == 9", ["value", ["f", (9.0).hex()]], True),
        ("assert f() == 9", ["value", 8], False),
        ("assert f() == 9", ["value", "9"], False),
        ("assert f() == 9", ["truth", True], False),
        ("assert f() == 9", ["opaque", "A"], False),
        ("assert f() == 9", ["value", [[[]]]], False),
        ("assert f() == (1, 2)", ["value", ["l", [1, 2]]], False),
        ("assert f() == g()", ["values", 1, 1], True),
        ("assert f() == g()", ["values", 1, 2], False),
        ("assert f() == g()", ["truth", True], True),
        ("assert f() == g()", ["truth", 1], False),
        ("with pytest.raises(KeyError, match='a+'):\n    f()", ["raised", ["Mine", "KeyError"], "baa"], True),
        ("with pytest.raises(KeyError, match='a+'):\n    f()", ["raised", ["KeyError"], "b"], False),
        ("with pytest.raises(KeyError):\n    f()", ["raised", [], ""], False),
        ("with pytest.raises(KeyError):\n    f()", ["raised", "KeyError", ""], False),
    ],
)
def test_what_was_seen_is_judged_outside(body, shown, passed):
    assert passes(heard(body, shown), None) is passed


@pytest.mark.parametrize(
    ("pattern", "message", "found"),
    [
        ("key {s} missing", "key {s} missing", True),
        ("key {s} missing", "ke missing", False),
        ("{e}", "it was {e}", True),
        ("a{e<=1}b", "a{e<=1}b", True),
        ("a{e}", "b", False),
        ("a{2}{d}", "aa{d}", True),
        (r"a\{i}", "a{i}", True),
        (r"\\{i}", r"\{i}", True),
        ("[{]s}", "{s}", True),
        ("^a{2,}b{,1}c{0}{}$", "aaa{}", True),
        (r"\N{BULLET} \w{3}", "\N{BULLET} abc", True),
        ("[[:alpha:]]", "x", False),
        ("[[:alpha:]]", "a]", True),
        ("[:alpha:]+", "x: a", True),
        ("(?x) key\\ {s} # {s}", "key {s}", True),
        ("a{2}}", "aa}", True),
        (r"\p{L}", "p{L}", False),
        ("(", "(", False),
        ("a{99999999999999999999}", "a", False),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_a_pattern_means_what_it_means_in_the_test(pattern, message, found):
    seen = heard(f"with pytest.raises(KeyError, match={pattern!r}):\n    f()", ["raised", ["KeyError"], message])
    assert passes(seen, None) is found
    with contextlib.suppress(re.error, OverflowError):
        assert bool(re.search(pattern, message)) is found


def test_a_pattern_that_regex_alone_refuses_is_searched_for_by_re(monkeypatch):
    def refuse(*_, **__):
        raise regex.error("no such pattern")

    monkeypatch.setattr(test_report.regex, "search", refuse)
    shown = ["raised", ["KeyError"], "baa"]
    assert passes(heard("with pytest.raises(KeyError, match='a+'):\n    f()", shown), None)


def test_a_truth_counts_by_its_draw():
    for seed in range(8):
        (site,) = seal("def test():\n    assert f()\n", witness="_w", drawn=random.Random(seed)).sites.values()
        assert holds(site, ["truth", not site.flipped], None)
        assert not holds(site, ["truth", site.flipped], None)


def test_claims_that_the_solution_reached_must_be_reached():
    body = "assert f() == 9\nassert f() == 8"
    solution = heard(body, ["value", 9], ["value", 8])
    assert passes(heard(body, ["value", 9], ["value", 8]), solution)
    assert not passes(heard(body, ["value", 9]), solution)
    assert not passes(heard(body, ["value", 9], ["value", 8], failed=True), solution)
    assert not passes(heard(body), None)


def test_forged_lines_are_counted_and_prove_nothing():
    sites = {"k": ("t.py", next(iter(sealed("assert f() == 9").sites.values())))}
    told = read_testimony(lines(["saw", "other", "value", 9], ["start", "t"], ["start", "u"], ["end", "u"], 7), sites)
    assert told.forged == 4
    assert not told.tests["t"].ended
    assert read_testimony(b"[" * 100_000 + b"\n", sites).tests == {}
