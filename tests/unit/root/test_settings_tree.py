"""Settings: one tree, checked once; a mistake is answered with the nearest valid name."""

import ast
import json
import stat
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest

import ostinato
from ostinato.config import Config, as_override, keys, load, load_saved, origins, parse_override, plain, save
from ostinato.core.errors import BadConfig


def test_defaults_stand_alone():
    assert load() == Config()


def test_file_then_overrides(tmp_path):
    path = tmp_path / "ostinato.toml"
    path.write_text('[learn]\nbatch = 32\n[train]\nlearning_rate = 1e-4\n[model]\nsource = "here"\n')
    config = load(path, ["train.learning_rate=1e-5"])
    assert (config.learn.batch, config.train.learning_rate, config.model.source) == (32, 1e-5, "here")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1e-5", (["a", "b"], 1e-5)),
        ("a.b=true", (["a", "b"], True)),
        ("a=[1, 2]", (["a"], [1, 2])),
        ("a.b=plain words", (["a", "b"], "plain words")),
        ("a.b='quoted'", (["a", "b"], "quoted")),
        ("a.b=x=y", (["a", "b"], "x=y")),
    ],
)
def test_overrides_are_toml_or_words(text, expected):
    assert parse_override(text) == expected


def test_every_key_that_may_be_null_can_be_set_to_it(tmp_path):
    """TOML has no null, and most such keys have another default."""
    path = tmp_path / "ostinato.toml"
    changed = [
        name for name, field in keys(Config) if field.default is not None and type(None) in get_args(field.annotation)
    ]
    assert "train.sequence_mask" in changed
    for name in changed:
        section, _, leaf = name.rpartition(".")
        path.write_text(f'[{section}]\n{leaf} = "null"\n')
        for config in (load(path), load(None, [f"{name}=null"])):
            assert attrgetter(name)(config) is None
    path.write_text('[[release.metrics]]\nname = "kept"\nnumerator = ["accepted > 0"]\ntolerance = "null"\n')
    assert load(path).release.metrics[0].tolerance is None
    path.write_text("[serve.sampling.acme]\ntemperature = 0.7\n")
    assert load(path, ["serve.sampling.acme.temperature=null"]).serve.sampling["acme"].temperature is None
    path.write_text('[reward.options]\nword = "null"\n[learn]\ntenants = ["null"]\n')
    config = load(path)
    assert (config.reward.options["word"], config.learn.tenants[0]) == ("null", "null"), "a word where null is none"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate'; did you mean 'train.learning_rate'?"),
        ("train.lr=1e-5", "unknown key 'train.lr'; did you mean 'train.learning_rate'?"),
        ("trian.learning_rate=1", "unknown key 'trian.learning_rate'; did you mean 'train.learning_rate'?"),
        ("learn.learning_rate=1", "unknown key 'learn.learning_rate'; did you mean 'train.learning_rate'?"),
        ("train.batch=1", "unknown key 'train.batch'; did you mean 'learn.batch'?"),
        ("gate.margin=0.1", "unknown key 'gate.margin'; did you mean 'evaluate.gate.margin'?"),
        ("evaluate.gate.margn=0.1", "unknown key 'evaluate.gate.margn'; did you mean 'evaluate.gate.margin'?"),
        ("release.control_share=0.1", "unknown key 'release.control_share'; did you mean 'serve.control_share'?"),
        ("port=1", "unknown key 'port'; did you mean 'listen.port'?"),
        ("train.qqqqqqqq=1", "unknown key 'train.qqqqqqqq'; valid here: learning_rate, "),
        ("qqqqqqqq=1", "unknown key 'qqqqqqqq'; valid here: "),
        ("train.learning_rate=-1", "train.learning_rate: Input should be greater than 0 (got -1)"),
        ("learn.batch=many", "learn.batch: set 'auto' or a number of turns, 1 or more (got 'many')"),
        ("learn.batch=0", "learn.batch: set 'auto' or a number of turns, 1 or more (got 0)"),
        ("evaluate.bars=[{axis='score'}]", "evaluate.bars.0: a bar needs one of at_least and at_most"),
        ("evaluate.bars=[{at_lest=0.5}]", "unknown key 'evaluate.bars.0.at_lest'"),
        ("model.device=gpu", "model.device: no such device; set 'cpu', 'cuda', 'cuda:1' or 'auto' (got 'gpu')"),
        ("record.namespace=pg_mine", "record.namespace: not a valid schema name; use up to 63 of a-z, 0-9 and _"),
        ("nonsense", "write it as section.key=value"),
        ("listen.port.number=3", "listen.port"),
    ],
)
def test_a_mistake_names_the_key_and_the_way_out(override, message):
    with pytest.raises(BadConfig) as caught:
        load(None, [override])
    assert message in str(caught.value)


def test_what_a_whole_section_must_hold_is_told_without_repeating_the_section():
    with pytest.raises(BadConfig) as caught:
        load(None, ["compute.lend.most=1", "compute.lend.hold_s=77"])
    assert "compute.lend: most is set" in str(caught.value)
    assert "77" not in str(caught.value)


def test_every_key_is_read_by_something():
    dead = {name.rpartition(".")[2] for name, _ in keys(Config)}
    for path in sorted(Path(ostinato.__file__).parent.rglob("*.py")):
        text = path.read_text()
        if any(f".{name}" in text for name in dead):
            dead -= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert dead == set()


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(BadConfig, match="no configuration file at"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(BadConfig, match=r"broken\.toml: not valid toml"):
        load(broken)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[]", "an object of sections"),
        ("a.json", "null", "an object of sections"),
        ("a.json", "[" * 200_000, "nested too deeply"),
        ("a.toml", f"a = {'[' * 3000}{']' * 3000}", "nested too deeply"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadConfig, match=rf"{name}: .*{said}"):
        load(tmp_path / name)


def test_an_override_that_is_nested_without_end_is_refused():
    with pytest.raises(BadConfig, match=r"--set train\.clip: the value is nested too deeply"):
        load(None, [f"train.clip={'[' * 3000}"])


@pytest.mark.parametrize(
    "text", ["it's", 'a "b"', "back\\slash", "tab\tend", "Zoë 東", "3", "true", " edge ", "'quoted'"]
)
def test_an_override_can_hold_any_text(text):
    assert parse_override(as_override("run.directory", text)) == (["run", "directory"], text)


def test_each_mistake_is_told_with_where_it_stands(tmp_path):
    path = tmp_path / "ostinato.toml"
    path.write_text('[train]\nclip = "high"\nlern = 3\n[serve]\napi_keys = [3]\n')
    with pytest.raises(BadConfig) as caught:
        load(path, ["learn.batch=many", "train.warmup_steps=2"])
    told = str(caught.value)
    assert f"{path}: train.clip: " in told
    assert f"{path}: unknown key 'train.lern'" in told
    assert f"{path}: serve.api_keys.0: " in told
    assert "--set: learn.batch: " in told
    assert " and " not in told
    with pytest.raises(BadConfig, match=r"; --set: train: "):
        load(path, ["train=3"])


def test_a_wrong_secret_is_not_repeated():
    with pytest.raises(BadConfig) as caught:
        load(None, ["serve.api_keys='sk-0123456789abcdef'"])
    assert "serve.api_keys" in str(caught.value)
    assert "sk-0123456789" not in str(caught.value)


def test_where_a_key_comes_from(tmp_path):
    path = tmp_path / "ostinato.toml"
    path.write_text('[learn]\nbatch = 32\n[weights]\noptions = { aws_region = "eu" }\n')
    assert origins(path, ["learn.batch=7", "reward.options={window=3.0}"]) == {
        "learn.batch": "--set",
        "weights.options.aws_region": str(path),
        "reward.options.window": "--set",
    }


def test_saved_and_loaded_is_the_same_and_private(tmp_path):
    secrets = ["serve.api_keys=['acme:sk-0123456789abcdef']", "serve.user_keys=['acme:secret-0123456789']"]
    config = load(None, [*secrets, "serve.admin_key=admin-0123456789", "learn.batch=7"])
    save(config, tmp_path / "config.json")
    assert load(tmp_path / "config.json") == config
    assert stat.S_IMODE((tmp_path / "config.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "config.json").read_text())["serve"]["api_keys"] == ["acme:sk-0123456789abcdef"]


def test_a_run_of_another_version_can_be_looked_at(tmp_path):
    path = tmp_path / "config.json"
    save(Config(), path)
    tree = json.loads(path.read_text())
    tree["gone"], tree["train"]["gone"], tree["learn"]["gone"] = {"a": 1}, 2, None
    tree["release"]["metrics"] = [{"name": "acceptance", "gone": 3}]
    path.write_text(json.dumps(tree))
    config, unknown = load_saved(path, ["train.clip=9.0"])
    assert unknown == ["gone", "learn.gone", "release.metrics.0.gone", "train.gone"]
    assert (config.train.clip, config.release.metrics[0].name) == (9.0, "acceptance")
    with pytest.raises(BadConfig, match=r"unknown key 'train\.gone'"):
        load_saved(path, ["train.gone=1"])
    path.write_text(json.dumps(tree | {"learn": {"batch": -1}}))
    with pytest.raises(BadConfig, match=r"learn\.batch"):
        load_saved(path)


def test_the_example_file_is_valid(request):
    load(request.config.rootpath / "ostinato.example.toml")


def test_what_workers_are_handed_is_the_configuration_with_every_secret():
    asked = Config.model_validate(
        {
            "serve": {
                "api_keys": ["acme:sk-0123456789abcdef"],
                "user_keys": ["acme:us-0123456789abcdef"],
                "admin_key": "ad-0123456789abcdef",
                "otlp": {
                    "endpoint": "http://127.0.0.1:4318",
                    "headers": {"authorization": "Bearer ot-0123456789abcdef"},
                },
            }
        }
    )
    assert Config.model_validate(json.loads(json.dumps(plain(asked)))) == asked
