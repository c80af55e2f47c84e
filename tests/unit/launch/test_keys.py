"""`ostinato config`: every key with its type, default, value, origin and meaning."""

import io
import json

import pytest
from rich.console import Console

from ostinato.config import Config, LearnConfig, keys, load, origins
from ostinato.core.errors import NotFound
from ostinato.launch.commands.config import list_keys, listed


def printed(path=None, overrides=(), prefix="", width=200, *, as_json=False):
    out = io.StringIO()
    console = Console(file=out, width=width)
    list_keys(load(path, overrides), path, overrides, prefix, console, as_json=as_json)
    return out.getvalue()


def test_every_key_is_listed_with_a_meaning_and_a_type_for_people():
    found = listed(Config(), {})
    assert [key.name for key in found] == [name for name, _ in keys(Config)]
    assert len(found) > 100
    for key in found:
        assert key.meaning, key
        assert key.kind, key
        assert "typing" not in key.kind, key
        assert "<" not in key.kind.replace("< ", "").replace("<= ", ""), key
        assert key.value == key.default
    kinds = {key.name: key.kind for key in found}
    assert kinds["learn.batch"] == "int or 'auto'"
    assert kinds["model.numerics"] == "'auto' or 'exact' or 'fast'"
    assert kinds["serve.api_keys"] == "list of secret"
    assert kinds["serve.admin_key"] == "secret or null"
    assert kinds["train.sequence_mask"] == "float or null > 1"
    assert kinds["listen.port"] == "int >= 0, <= 65535"
    assert kinds["publish.skips"] == "list of int"
    assert kinds["weights.options"] == "table"
    assert kinds["run.directory"] == "path"


def test_what_was_set_stands_out_with_where_it_came_from(tmp_path):
    path = tmp_path / "ostinato.toml"
    path.write_text("[train]\nclip = 0.5\nthreads = 1\n[reward]\noptions = { window = 3.0 }\n")
    overrides = ("train.learning_rate=1e-5",)
    found = {key.name: key for key in listed(load(path, overrides), origins(path, overrides))}
    assert (found["train.clip"].value, found["train.clip"].default, found["train.clip"].origin) == (0.5, 1.0, str(path))
    assert found["train.learning_rate"].origin == "--set"
    assert found["train.threads"].origin == str(path), "set, although to the default"
    assert found["reward.options"].origin == str(path)
    assert found["learn.batch"].origin == ""
    for width in (60, 200):
        text = " ".join(printed(path, overrides, "train.clip", width).split())
        for word in ("train.clip", "0.5", "1.0", "float > 0", "gradient"):
            assert word in text, (width, text)


def test_secrets_are_not_shown():
    overrides = ("serve.api_keys=['acme:sk-0123456789abcdef']", "serve.admin_key='sk-fedcba9876543210'")
    for as_json in (False, True):
        text = printed(None, overrides, as_json=as_json)
        assert "0123456789" not in text
        assert "fedcba" not in text


def test_as_json_it_can_be_read_by_programs():
    found = json.loads(printed(prefix="learn", as_json=True))
    assert {key["name"] for key in found} == {f"learn.{name}" for name in type(Config().learn).model_fields}
    assert next(key for key in found if key["name"] == "learn.batch") == {
        "name": "learn.batch",
        "kind": "int or 'auto'",
        "default": "auto",
        "value": "auto",
        "origin": "",
        "meaning": LearnConfig.model_fields["batch"].description,
    }


@pytest.mark.parametrize(
    ("prefix", "names"),
    [("evaluate.gate", ["evaluate.gate.margin"]), ("listen.port", ["listen.port"]), ("train", ["train.learning_rate"])],
)
def test_a_prefix_ends_at_a_dot(prefix, names):
    text = printed(prefix=prefix)
    assert all(name in text for name in names)
    assert "learn.batch" not in text


@pytest.mark.parametrize(
    ("prefix", "told"), [("trian", "'train'"), ("train.lr", "'train.learning_rate'"), ("zzz", "sections: ")]
)
def test_a_prefix_of_nothing_names_the_nearest(prefix, told):
    with pytest.raises(NotFound) as caught:
        printed(prefix=prefix)
    assert told in str(caught.value)


def test_a_list_of_tables_stands_a_table_a_line():
    lines = [line.strip() for line in printed(prefix="release.metrics", width=120).splitlines()]
    for name in ("acceptance", "latency_p99", "feedback_coverage"):
        assert [line for line in lines if line.startswith(f"{{ name = '{name}', role = ")], name
