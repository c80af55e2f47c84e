"""Every field of every object of a request is used, ignored or refused as its model and the guide say."""

import inspect
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.unit.serve.field_tables import TABLES, Object, marked, page

from ostinato.core.errors import BadRequest
from ostinato.serve.dialects import anthropic, openai, responses, responses_items
from ostinato.serve.dialects.field_rules import Ignored, Only

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "fields.md"
OBJECTS = [(path, each) for path, objects in TABLES.items() for each in objects]
FIELDS = [(path, each, name, mark) for path, each in OBJECTS for name, mark in marked(each.model)]
IGNORED, LIMITED, USED = (
    [
        pytest.param(each, name, mark, id=f"{path} {each.name} {name}")
        for path, each, name, mark in FIELDS
        if isinstance(mark, kind)
    ]
    for kind in (Ignored, Only, type(None))
)
NONSENSE = (5.5, {"nonsense": [5.5]}, [[5.5]])


def outcome(each: Object, **more):
    """What a request with this object asks for: the prompt, and how tokens are drawn."""
    request = each.parse(each.within(each.sample | more))
    if not hasattr(request, "sampling"):
        return request
    prompt = getattr(request, "conversation", None) or request.prompt
    return prompt, request.sampling(9), request.n, request.budget, request.stream, request.asker


def refusal(each: Object, **more) -> BadRequest | None:
    try:
        outcome(each, **more)
    except BadRequest as error:
        return error
    return None


@pytest.mark.parametrize(("each", "name", "mark"), IGNORED)
def test_an_ignored_field_changes_nothing(each, name, mark):
    kinds = ["x", True, 7, {"x": [1]}, ["x"]]
    taken = [value for value in kinds if refusal(each, **{name: value}) is None]
    assert taken, refusal(each, **{name: "x"})
    assert all(outcome(each, **{name: value}) == outcome(each) for value in taken)
    assert mark.why


@pytest.mark.parametrize(("each", "name", "mark"), LIMITED)
def test_a_field_with_values_that_change_nothing_is_refused_with_any_other(each, name, mark):
    for value in (None, *mark.values):
        assert outcome(each, **{name: value}) == outcome(each)
    for value in ("something else", 7.25):
        error = refusal(each, **{name: value})
        assert error is not None
        assert error.field.rpartition(".")[2] == name
        assert f"{mark.why}; leave it out" in str(error)


@pytest.mark.parametrize(("each", "name", "mark"), USED)
def test_a_used_field_is_not_ignored(each, name, mark):
    errors = [refusal(each, **{name: value}) for value in NONSENSE]
    named = [error for error in errors if error is not None and name in f"{error.field} {error}"]
    assert named, errors


@pytest.mark.parametrize(("path", "each"), OBJECTS, ids=lambda value: getattr(value, "name", value))
def test_other_fields_are_refused_or_ignored_as_the_guide_says(path, each):
    if each.model.model_config.get("extra") == "ignore":
        assert outcome(each, unheard_of=1) == outcome(each)
        return
    error = refusal(each, unheard_of=1)
    assert error is not None
    assert "nearest valid one" in str(error)
    assert outcome(each, unheard_of=None) == outcome(each)


def test_no_object_of_a_request_is_missing():
    modules = (anthropic, openai, responses, responses_items)
    known = {each.model for _, each in OBJECTS}
    missing = [
        name
        for module in modules
        for name, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and issubclass(value, BaseModel)
        if not name.startswith("_") and value not in known
    ]
    assert missing == []


def test_the_guide_shows_the_tables():
    assert GUIDE.read_text() == page(), "python -m tests.unit.serve.field_tables > docs/guide/fields.md"
