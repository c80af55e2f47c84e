"""Which replica answers: whatever was asked before, nobody has too much to do, and prompts that begin alike meet."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.vllm.engine import BLOCK, BOUND, SentPrefixes, links, route

KEY = b"one version and one salt"
NAMES = st.lists(st.sampled_from([f"http://{host}" for host in "abcdefgh"]), min_size=1, max_size=8, unique=True)
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(lambda each: [i for i in each for _ in range(11)])


def to(names, chain, running, known=None, samples=1):
    known = known or dict.fromkeys(names, 0)
    return route(known, running, dict.fromkeys(names, chain), samples)


@given(NAMES, st.lists(st.tuples(PROMPTS, st.booleans()), max_size=60))
def test_no_replica_has_more_than_its_bound_of_single_samples(names, story):
    """The bound holds for who is given a request; one that others left behind with more is given nothing."""
    sent, running = SentPrefixes(), dict.fromkeys(names, 0)
    for prompt, ends in story:
        chain = links(KEY, prompt)
        name = to(names, chain, running, {each: sent.known(each, chain) for each in names})
        sent.send(name, chain)
        running[name] += 1
        assert running[name] <= math.ceil(BOUND * sum(running.values()) / len(names))
        if ends and any(running.values()):
            running[max(running, key=running.__getitem__)] -= 1


@given(NAMES, st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50)), PROMPTS, st.integers(1, 128))
def test_many_samples_are_never_split_and_go_to_one_with_room_or_with_least(names, open_, prompt, samples):
    running = {name: open_.get(name[-1], 0) for name in names}
    name = to(names, links(KEY, prompt), running, samples=samples)
    most = math.ceil(BOUND * (sum(running.values()) + samples) / len(names))
    assert running[name] + samples <= most or running[name] == min(running.values())


@given(NAMES, PROMPTS)
def test_idle_replicas_are_asked_for_the_same_prompt_by_the_same_one_whatever_their_order(names, prompt):
    idle, chain = dict.fromkeys(names, 0), links(KEY, prompt)
    assert to(names, chain, idle) == to(names[::-1], chain, idle)


@given(NAMES.filter(lambda names: len(names) > 1), PROMPTS, st.data())
def test_a_replica_that_goes_moves_its_own_prompts_only(names, prompt, data):
    chain, gone = links(KEY, prompt), data.draw(st.sampled_from(names))
    before = to(names, chain, dict.fromkeys(names, 0))
    left = [name for name in names if name != gone]
    after = to(left, chain, dict.fromkeys(left, 0))
    assert before in (gone, after)


@given(st.lists(st.integers(0, 9), max_size=200), st.lists(st.integers(0, 9), max_size=200))
def test_links_are_shared_exactly_as_far_as_whole_blocks_are(one, two):
    first, second = links(KEY, one), links(KEY, two)
    same = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    shared = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if one == two:
        assert first == second
    else:
        assert (min(len(first), len(second)) if shared is None else shared) == same // BLOCK
    assert not set(first) & set(links(b"another", one))


def test_a_conversation_stays_where_it_is_and_a_shared_beginning_is_no_reason_to_crowd():
    """All begin with the same long text. Once every replica knows it, later turns go where their own part is known."""
    names, system = [f"http://{host}" for host in "abcd"], list(range(4 * BLOCK))
    sent, idle, homes = SentPrefixes(), dict.fromkeys("", 0), {}
    for name in names:
        sent.send(name, links(KEY, system))
    idle = dict.fromkeys(names, 0)
    for turn in range(1, 4):
        for user in range(32):
            chain = links(KEY, [*system, *[1000 + user] * (turn * BLOCK)])
            name = to(names, chain, idle, {each: sent.known(each, chain) for each in names})
            sent.send(name, chain)
            assert homes.setdefault(user, name) == name
    assert set(homes.values()) == set(names)


def test_the_most_known_wins_over_the_hash_until_it_has_too_much_to_do():
    names, chain = ["http://a", "http://b"], links(KEY, range(200))
    for better in names:
        known = {name: 2 * (name == better) for name in names}
        assert to(names, chain, dict.fromkeys(names, 0), known) == better
        busy = {name: 9 * (name == better) for name in names}
        assert to(names, chain, busy, known) != better


def test_what_was_sent_long_ago_is_forgotten_the_end_of_a_prompt_before_its_beginning():
    sent, chain = SentPrefixes(kept=4), links(KEY, range(3 * BLOCK))
    sent.send("http://a", chain)
    sent.send("http://a", links(KEY, range(1000, 1000 + 2 * BLOCK)))
    assert sent.known("http://a", chain) == 2
    assert sent.known("http://b", chain) == 0
