"""A person's place: the same for ever, spread evenly, and never shared by two people whose names run together."""

from ostinato.core.arm_assignment import dealing_key, place_of

PLACE_OF_ANN = 0.7905285241623224


def test_a_persons_place_never_changes():
    """The literal holds who is in which arm: whoever changes the hash deals every user of every product anew."""
    assert place_of(dealing_key("ostinato"), "default", "ann") == PLACE_OF_ANN
    assert place_of(dealing_key("another"), "default", "ann") != PLACE_OF_ANN


def test_places_are_spread_evenly():
    key = dealing_key("salt")
    places = sorted(place_of(key, "default", f"u{n}") for n in range(2_000))
    assert max(abs(place - n / 2_000) for n, place in enumerate(places)) < 0.04  # Kolmogorov and Smirnov at p < 0.003
    assert 0.0 <= places[0] < places[-1] < 1.0


def test_names_that_run_together_are_different_people():
    key = dealing_key("salt")
    assert place_of(key, "ab", "c") != place_of(key, "a", "bc")
