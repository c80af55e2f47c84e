"""Properties get a quarter of their examples, wherever they are, and all of them with the profile that says so."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property_examples import FULL, reduce_examples


def prop(examples=None):
    @given(st.integers())
    def test(number):
        pass

    return test if examples is None else settings(max_examples=examples)(test)


def number(test):
    return test._hypothesis_internal_use_settings.max_examples


@pytest.mark.parametrize(("own", "fewer"), [(None, 25), (400, 100), (40, 10), (12, 10), (3, 3)])
def test_a_property_gets_a_quarter_but_ten_if_it_has_as_many(own, fewer):
    test = prop(own)
    reduce_examples([SimpleNamespace(obj=test), SimpleNamespace(obj=len), SimpleNamespace()])
    assert number(test) == fewer
    assert not hasattr(len, "_hypothesis_internal_use_settings")


def test_a_method_is_a_property_too():
    class Holder:
        test_method = prop(80)

    reduce_examples([SimpleNamespace(obj=Holder().test_method)])
    assert number(Holder.test_method) == 20


def test_the_profile_of_all_examples_changes_none():
    test, before = prop(400), settings.get_current_profile_name()
    settings.load_profile(FULL)
    try:
        reduce_examples([SimpleNamespace(obj=test)])
    finally:
        settings.load_profile(before)
    assert number(test) == 400


def test_these_tests_own_properties_get_fewer(request):
    """The hook does it for each property that is collected."""
    own = [item for item in request.session.items if item.name == "test_one_of_all"]
    assert [number(item.obj) for item in own] == [25]


@given(st.integers())
def test_one_of_all(value):
    assert isinstance(value, int)
