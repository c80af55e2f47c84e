"""How many examples a property gets: a quarter of its own number, all of them with `pytest --hypothesis-profile full tests/property`."""

from pathlib import Path

from hypothesis import is_hypothesis_test, settings

settings.register_profile("full", deadline=None)
HERE = Path(__file__).parent
SHARE, FEWEST = 4, 10


def pytest_collection_modifyitems(items):
    if settings.get_current_profile_name() == "full":
        return
    for item in items:
        test = getattr(item.obj, "__func__", item.obj) if item.path.is_relative_to(HERE) else None
        if is_hypothesis_test(test):
            own = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
            fewer = min(own.max_examples, max(FEWEST, own.max_examples // SHARE))
            test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)
