"""What `ostinato worlds probe` prints, with and without the task mix."""

import io
import json

import pytest
from rich.console import Console
from tests.fakes.lookalikes import episodes

from ostinato.core.errors import BadRequest
from ostinato.launch.commands.worlds.probe import show_probe


@pytest.fixture
def files(tmp_path):
    found = []
    for side, popular in (("p", 3.0), ("s", 0.0)):
        file = tmp_path / f"{side}.jsonl"
        file.write_text("".join(each.line() + "\n" for each in episodes(1, side, 30, popular=popular)))
        found.append(file)
    return found


def told(files, **more):
    out = io.StringIO()
    show_probe(*files, 0, 5, Console(file=out, width=200), **more)
    return out.getvalue()


def test_what_was_shared_and_left_out_is_said(files):
    printed = told(files, same_prompts=True, machine=False)
    found = json.loads(told(files, same_prompts=True, machine=True))
    pairs, left = found["production"][0], found["prompts"]["left_out"]
    assert left == [90 - pairs, 90 - pairs]
    assert f"{found['prompts']['shared']} prompts are shared, {pairs} pairs drawn" in printed
    assert f"{left[0]} of production and {left[1]} of simulation left out" in printed
    assert "the task mix set aside" in printed
    assert "385 independent pairs" in found["verdict"]


def test_without_it_nothing_is_set_aside(files):
    printed, found = told(files, machine=False), json.loads(told(files, machine=True))
    assert "set aside" not in printed
    assert (found["prompts"], found["paired"], found["production"]) == (None, False, [90, 30])


def test_files_that_share_nothing_are_refused(files):
    files[1].write_text(files[1].read_text().replace('"asked": "q', '"asked": "other'))
    with pytest.raises(BadRequest, match="nothing was asked on both sides"):
        told(files, same_prompts=True, machine=True)
