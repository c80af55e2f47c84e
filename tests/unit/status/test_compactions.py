"""Quality of summaries: lengths, facts kept and needed, what followed with its interval; bounded, without words, and gone with a person."""

import json
import random
from dataclasses import replace

import pytest
from tests.fakes.page_world import RUN

from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Consent, Purpose, Reward, Window, WindowMaker
from ostinato.launch.views.numbers import LearningNumbers
from ostinato.status.compactions import (
    LEAST_PEOPLE,
    SESSIONS,
    SUMMARIES,
    CompactionTally,
    compactions_line,
    compactions_now,
    facts_of,
    facts_sentence,
    rewards_sentence,
)
from ostinato.status.summary import Summary
from ostinato.testing.records import a_turn
from ostinato.web.page.templates import StaticFiles, Templates
from ostinato.web.page.views import compactions_shown, now_shown, state_of

LONG = tuple(range(4_000))


def said(id, text, *, episode="e", user="ann", prompt=LONG, tokens=100, purpose=Purpose.TASK, begins=None, **more):
    window = None if begins is None else Window(number=1, begins_with=begins, by=WindowMaker.AGENT)
    turn = a_turn(id, user=user, prompt=prompt, sampled=(5,) * tokens, **more)
    return replace(turn, episode=episode, text=text, purpose=purpose, window=window)


def chain(episode="e", user="ann", *, kept="parser.py line 42", then="Mend parser.py and lexer.py."):
    """A session: two answers, a summary, and two answers after it."""
    mine = {"episode": episode, "user": user}
    return [
        said(f"{episode}-a:0", "Read parser.py, lexer.py and read_all.", **mine),
        said(f"{episode}-b:0", "It fails in line 42.", **mine),
        said(f"{episode}-s:0", f"Done so far: {kept}.", tokens=80, purpose=Purpose.COMPACTION, **mine),
        said(f"{episode}-c:0", then, prompt=LONG[:1_200], begins=f"{episode}-s:0", **mine),
        said(f"{episode}-d:0", "Done.", prompt=LONG[:1_300], **mine),
    ]


def rated(turns, value):
    return [Reward(turn=turn.id, value=value, function="f@1", signals=("s",), at=20.0) for turn in turns]


def folded(rows):
    seen = Summary()
    for cursor, row in enumerate(rows, start=1):
        seen.apply(cursor, row)
    return seen


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Mend read_1 in src/parser.py, line 42.", 3),
        ("parser.py parser.py. (parser.py)", 1),
        ("I looked at it, and THEN at the README, in 3 ways.", 0),
        ("useState of the HTTPServer at 10:30, v2.1", 5),
        ("", 0),
        ("x." * 50_000, 1),
        ("/" * 100_000, 0),
    ],
)
def test_names_numbers_and_paths_are_facts(text, number):
    assert len(facts_of(text, "e")) == number
    assert not number or facts_of(text, "e") != facts_of(text, "another session")


def test_a_summarys_facts_are_those_of_the_answers_before_it_and_needed_if_answers_after_it_name_them():
    seen = folded(chain())
    found = compactions_now(seen.compactions)
    assert (found.asked, found.begun, found.seen) == (1, 1, 1)
    assert (found.tokens, found.ratio, found.left) == (80, 50.0, 0.3)
    # parser.py, lexer.py, read_all and 42, of which two are kept; parser.py and lexer.py are named again, and one of them was kept
    assert (found.facts, found.kept, found.needed, found.found) == (4, 0.5, 2, 0.5)
    assert facts_sentence(found) == (
        "summaries keep 50% of the facts that answers named before them, and 50% of the 2 that answers name again"
    )
    assert (
        "summaries: 1 sampled, 1 windows began with one; median 80 tokens, 1/50 of the prompt, of which 30% are left"
        in compactions_line(found)
    )


def test_summaries_with_which_no_window_began_are_told_apart_and_other_calls_are_no_part():
    first, second, *rest = chain()
    tries = [said(f"try{n}:0", "lexer.py read_all", purpose=Purpose.COMPACTION) for n in range(6)]
    aside = [said("x:0", "other.py", purpose=Purpose.SUBAGENT), said("y:0", "title.py", purpose=Purpose.SIDE)]
    alien = [said("w:0", "a.py", episode="f", arm=Arm.WORLD), replace(said("n:0", "b.py"), consent=Consent.NEVER)]
    found = compactions_now(folded([first, *aside, *alien, second, *tries, *rest]).compactions)
    assert (found.asked, found.begun, found.facts, found.needed) == (7, 1, 4, 2)
    assert compactions_now(folded([first, second, *tries]).compactions).seen == 0
    short = [replace(turn, prompt_ids=(1, 2, 3)) for turn in chain()]
    assert compactions_now(folded(short).compactions) is None, "a short conversation is not followed"
    assert compactions_now(Summary().compactions) is None


def test_the_next_summary_is_measured_in_its_own_window():
    rows = chain()[:4]
    rows += [said("t:0", "Summary: lexer.py.", tokens=40, purpose=Purpose.COMPACTION)]
    rows += [said("z:0", "lexer.py it is.", prompt=LONG[:1_100], begins="t:0")]
    found = compactions_now(folded(rows).compactions)
    assert (found.begun, found.seen, found.tokens) == (2, 2, 60)
    # the second window has what the first summary kept, parser.py and 42, and lexer.py, which is kept and needed
    assert (found.facts, found.needed, found.found) == (4 + 3, 2 + 1, 2 / 3)


def crowd(people, effect, *, rng=None):
    """Sessions of as many people on both sides; those with a summary earn more by `effect` on average."""
    rng, rows = rng or random.Random(7), []
    for number in range(people):
        for kind in ("with", "without"):
            episode, user = f"{kind}{number}", f"{kind} {number}"
            turns = chain(episode, user) if kind == "with" else [said(f"{episode}:0", "hm", episode=episode, user=user)]
            value = rng.uniform(-0.5, 0.5) + (effect if kind == "with" else 0.0)
            rows += [*turns, *rated([turn for turn in turns if turn.purpose is Purpose.TASK], value)]
    return rows


def test_what_followed_has_its_interval_once_there_are_people_enough():
    for effect in (-0.4, 0.4):
        found = compactions_now(folded(crowd(60, effect)).compactions)
        lower, upper = found.rewards.between
        assert lower < effect < upper
        assert (lower > 0) == (effect > 0)
        assert upper - lower < 0.3
        assert f"95% [{lower:+.2f}, {upper:+.2f}]" in rewards_sentence(found)
        assert found.found_between[0] < found.found < found.found_between[1]
    few = compactions_now(folded(crowd(LEAST_PEOPLE - 1, 0.4)).compactions)
    assert (few.rewards.between, few.found_between) == (None, None)
    assert "too few people for an interval (9 and 9; 10 on each side are needed)" in rewards_sentence(few)
    alone = compactions_now(folded(chain()).compactions)
    assert "no rewards yet" in rewards_sentence(alone)
    equal = [row if not isinstance(row, Reward) else replace(row, value=-7.0) for row in crowd(20, 0.0)]
    rewards = compactions_now(folded(equal).compactions).rewards
    assert (rewards.with_summary, rewards.without) == (-1.0, -1.0), "clipped"
    assert rewards.between[0] < 0.0 < rewards.between[1]


@pytest.mark.parametrize("cut", range(1, 12))
def test_the_fold_is_the_same_wherever_it_is_cut(cut):
    rows = [*chain(), *rated(chain(), 1.0), *chain("f", "bob"), *rated(chain("f", "bob"), -1.0)]
    whole, seen = folded(rows), folded(rows[:cut])
    seen = Summary.of(seen.cursor, json.loads(json.dumps(seen.state())))
    for cursor, row in enumerate(rows[cut:], start=cut + 1):
        seen.apply(cursor, row)
    assert seen == whole
    assert seen.state()["compactions"] == whole.state()["compactions"]


def test_it_holds_no_word_and_nothing_of_a_forgotten_person():
    seen = folded([*chain("e", "ann"), *chain("f", "bob"), *rated(chain("e", "ann"), 1.0)])
    kept = json.dumps(seen.compactions.state())
    assert not any(word in kept for word in ("parser", "lexer", "read_all"))
    seen.apply(99, Forgotten(id="f1", tenant="default", user="ann", key=0, at=1.0))
    kept = json.dumps(seen.compactions.state())
    assert "ann" not in kept
    assert compactions_now(seen.compactions).seen == 1
    seen.apply(100, Forgotten(id="f2", tenant="default", user=None, key=0, at=1.0))
    assert compactions_now(seen.compactions).seen == 0


def test_it_is_bounded_whatever_comes():
    tally = CompactionTally()
    text = " ".join(f"file_{n}.py" for n in range(2_000))
    busy = said("b:0", text)
    for number in range(SESSIONS + 100):
        tally.turn(replace(busy, id=f"b{number}:0", episode=f"e{number}"))
        tally.turn(said(f"s{number}:0", "file_1.py", episode=f"e{number}", purpose=Purpose.COMPACTION))
        tally.turn(said(f"c{number}:0", "Go on.", episode=f"e{number}", begins=f"s{number}:0"))
    assert len(tally.sessions) == SESSIONS
    assert len(tally.summaries()) == SUMMARIES
    assert len(json.dumps(tally.state())) < 2_000_000


def test_it_stands_on_the_page_in_the_metrics_and_in_the_status():
    seen = folded(crowd(60, 0.4))
    found = compactions_now(seen.compactions)
    for shown, there in ((found, True), (None, False)):
        run = replace(RUN, compactions=shown)
        page = Templates(StaticFiles()).render("_now.html", {**now_shown(run), "run": run, "state": state_of(run)})
        assert ("summaries-title" in page) == there
    page = Templates(StaticFiles()).render("_summaries.html", {"compactions": compactions_shown(found)})
    for words in ("Summaries keep 50%", "Sessions that were summarised earn +0.3", "Needed facts kept"):
        assert words in page, words
    assert "with 1" not in page, "no names"
    metrics = {
        sample.name: sample.value for family in LearningNumbers(summary=seen).collect() for sample in family.samples
    }
    assert metrics["ostinato_compaction_facts_kept"] == 0.5
    assert metrics["ostinato_compaction_tokens"] == 80
    lower, upper = (metrics[f"ostinato_compaction_reward_difference_{end}"] for end in ("lower", "upper"))
    assert lower < metrics["ostinato_compaction_reward_difference"] < upper
