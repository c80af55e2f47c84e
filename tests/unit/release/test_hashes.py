"""A set that shares what it holds with the sets it was made from."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.release.ledger import Hashes


def test_older_sets_stay_what_they_were():
    first = Hashes(["a", "b"])
    second = first.adding("c")
    other = first.adding("d")
    assert (first, second, other) == ({"a", "b"}, {"a", "b", "c"}, {"a", "b", "d"})
    assert second.adding("a") == second
    assert second - {"a"} == {"b", "c"}
    assert "d" not in second
    assert Hashes().adding("x") == {"x"}
    assert Hashes() == set()


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcdefgh"))))
def test_it_is_a_set_whatever_was_added_to_which(steps):
    made, wanted = [Hashes()], [set()]
    for of, name in steps:
        of %= len(made)
        made.append(made[of].adding(name))
        wanted.append(wanted[of] | {name})
    assert made == wanted
    assert [len(each) for each in made] == [len(each) for each in wanted]
