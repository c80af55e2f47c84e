"""How many examples a property gets: a quarter of its own number; all of them with `pytest --hypothesis-profile full -m hypothesis`."""

from hypothesis import is_hypothesis_test, settings

FULL, SHARE, FEWEST = "full", 4, 10
settings.register_profile(FULL, deadline=None)


def reduce_examples(items) -> None:
    """Give the properties among these tests fewer examples, unless the profile is that of all."""
    if settings.get_current_profile_name() == FULL:
        return
    for item in items:
        test = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        if is_hypothesis_test(test):
            own = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
            fewer = min(own.max_examples, max(FEWEST, own.max_examples // SHARE))
            test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)
