"""However owners use their rounds: nobody starves, nobody has more than its part and a step, and no round is without anybody who waits."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ostinato.serve.fair_loop import LoopRounds

QUANTUM_S = 1.0
LONGEST_S = 5.0

owners = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.floats(0.0, LONGEST_S), min_size=1, max_size=30), min_size=1
)


@given(owners)
def test_all_is_done_in_order_within_the_parts(steps):
    rounds = LoopRounds(QUANTUM_S)
    done, used = {owner: [] for owner in steps}, Counter()

    def go(owner, number):
        rounds.charge(owner, steps[owner][number])
        used[owner] += steps[owner][number]
        done[owner].append(number)

    for owner, each in steps.items():
        for number in range(len(each)):
            if rounds.may_go(owner):
                go(owner, number)
            else:
                rounds.wait(owner, (owner, number))
    passed, most = 1, 31 * (LONGEST_S / QUANTUM_S + 1)
    while rounds.open:
        for owner, number in rounds.begin():
            if rounds.has_left(owner):
                go(owner, number)
            else:
                rounds.wait(owner, (owner, number), again=True)
        passed += 1
        assert passed <= most, "what is waited for comes"
        assert all(used[owner] <= passed * QUANTUM_S + max(each) for owner, each in steps.items()), (
            "a part and one step"
        )
    assert done == {owner: [*range(len(each))] for owner, each in steps.items()}, "each owner's steps in their order"
    assert len(rounds) == 0


@given(st.integers(2, 6), st.integers(20, 60))
def test_equal_steps_of_many_owners_get_equal_parts(count, rounds_):
    rounds, used = LoopRounds(QUANTUM_S), Counter()
    names = [f"owner {number}" for number in range(count)]
    for name in names:
        rounds.charge(name, 0.5)
        for _ in range(1000):
            rounds.wait(name, name)
    for _ in range(rounds_):
        for name in rounds.begin():
            if not rounds.has_left(name):
                rounds.wait(name, name, again=True)
                continue
            rounds.charge(name, 0.5)
            used[name] += 1
    assert max(used.values()) - min(used.values()) <= 2
    assert rounds_ <= min(used.values()), "as long as somebody waits, something goes on"
