"""The simulated people of the personal demo: wishes around a common taste, and a logistic choice."""

import statistics

import pytest

from ostinato.core.arm_assignment import holdout_place
from ostinato.demo.personal import SimulatedPerson, balanced_ids, make_people

MEASURES = {
    "exclaims": lambda text, ended: float("!" in text),
    "commas": lambda text, ended: float(text.count(",")),
}
MEASURED = {"exclaims": [0.0, 0.0, 0.0, 1.0], "commas": [0.0, 2.0, 4.0, 2.0]}


def test_most_wish_for_more_and_each_in_proportions_of_their_own():
    ids = [f"sim-{number}" for number in range(400)]
    people = make_people(ids, MEASURED, seed=3)
    assert people == make_people(ids, MEASURED, seed=3)
    assert people != make_people(ids, MEASURED, seed=4)
    for person in people:
        assert sum(wish**2 for wish in person.wishes.values()) == pytest.approx(1.0)
    for name in MEASURED:
        wishes = [person.wishes[name] for person in people]
        assert 0.05 < sum(wish < 0.0 for wish in wishes) / len(wishes) < 0.2
        assert statistics.pstdev(wishes) > 0.2


def test_who_a_person_is_does_not_depend_on_the_others():
    together = make_people(["a", "b"], MEASURED, seed=0)
    assert make_people(["b"], MEASURED, seed=0) == together[1:]


def test_what_a_person_wishes_is_accepted_more_and_its_opposite_less():
    person = SimulatedPerson(
        id="sim-0", wishes={"exclaims": 0.8, "commas": -0.6}, usual={"exclaims": (0.5, 0.5), "commas": (1.0, 1.0)}
    )
    yes, no, commas = (person.acceptance(text, MEASURES) for text in ("yes, so!", "yes, so", "yes,, so"))
    assert no < 0.5 < yes
    assert commas < no
    assert person.acceptance("," * 4, MEASURES) == person.acceptance("," * 400, MEASURES), "clipped"


def test_a_wish_for_what_never_varies_is_harmless():
    (person,) = make_people(["sim-0"], {"exclaims": [0.0, 0.0, 0.0]}, seed=0)
    assert person.acceptance("hm", MEASURES) == pytest.approx(0.5)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_as_many_people_are_held_out_as_may_lean_whatever_the_share(share):
    ids = balanced_ids("default", 2, 40, share)
    assert len(set(ids)) == 80
    assert sum(holdout_place(("default", id)) < share for id in ids) == 40
