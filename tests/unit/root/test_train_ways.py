"""`ostinato train` has several ways to train: an option that would change nothing is an error, and no trainer starts."""

import pytest

from ostinato.cli.commands import app
from ostinato.core.errors import BadConfig, BadRequest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 5", "--steps goes with --world"),
        ("--out m", "--out goes with --demonstrations or --corpus"),
        ("--tokens 100", "go with --corpus"),
        ("--mixture 0.5 --world w.jsonl", "go with --corpus"),
        ("--world w.jsonl --corpus c --out m", "--world and --corpus do not go together"),
        ("--demonstrations d.jsonl --corpus c --out m", "--demonstrations and --corpus do not go together"),
        ("--demonstrations d.jsonl", "--demonstrations needs --out"),
        ("--corpus c", "--corpus needs --out"),
    ],
)
def test_an_option_without_its_way_is_refused_by_name(words, message):
    with pytest.raises(BadConfig, match=message):
        app(["train", *words.split()], exit_on_error=False, result_action="return_value")


def test_a_build_of_no_package_says_how_to_name_one(tmp_path):
    with pytest.raises(BadRequest, match="name a package, as in"):
        app(["worlds", "build", "--out", str(tmp_path / "t.jsonl")], exit_on_error=False, result_action="return_value")
