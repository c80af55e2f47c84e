"""`ostinato adapt fit` on a tiny model: a basis for the live version lands in the log, and everything else is refused with the remedy."""

import io

import pytest
from rich.console import Console

from ostinato.adapt import fit as fitting
from ostinato.app.gateway import protected_ids
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.records import SteeringBasis
from ostinato.launch.commands.adapt import fit, read_prompts
from ostinato.launch.workers.prepare import prepare
from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import tiny_model

NUMERICS = ("model.numerics='fast'", "model.dtype='float32'", "engine.kv_tokens=4096")


def settings(tmp_path, *more):
    return load(None, [f"run.directory={tmp_path / 'run'}", f"model.source={tmp_path / 'model'}", *NUMERICS, *more])


async def test_a_basis_for_the_live_version_lands_in_the_log(tmp_path, monkeypatch):
    tiny_model(tmp_path / "model")
    config, said = settings(tmp_path, "adapt.protected=['x','yz']"), io.StringIO()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["one", "two", "three", "four", "one", ""]))
    # a random model's answers have none of the built-in attributes
    monkeypatch.setattr(
        "ostinato.app.dials.ATTRIBUTES", {"long": lambda text, ended: len(text.encode()), **fitting.ATTRIBUTES}
    )
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        live = await run.follower.resolve("live")
        before = [row async for _, row in run.log.read(0, {SteeringBasis})]
    assert before == []
    await fit(config, prompts, each=16, tokens=6, seed=1, console=Console(file=said, width=120))
    with open_run(config) as run:
        (row,) = [row async for _, row in run.log.read(0, {SteeringBasis})]
    assert row.weights == live.hash
    basis = row.basis()
    assert set(basis.names) <= {"long", *fitting.ATTRIBUTES}
    assert basis.hash in said.getvalue()
    renderer = HFRenderer(tmp_path / "model")
    never = {id for text in ("x", " x", "yz", "```", "~~~", "<tool_call>") for id in renderer.encode(text)}
    assert never <= protected_ids(config, renderer)
    assert never.isdisjoint(basis.tokens_M.tolist())
    assert len(basis.tokens_M) > 200


async def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(NotFound, match="ostinato up"):
        await fit(settings(tmp_path), None, each=2, tokens=2, seed=0, console=Console(file=io.StringIO()))


def test_a_file_of_prompts_is_read_line_by_line_or_refused(tmp_path):
    path = tmp_path / "p"
    with pytest.raises(BadConfig, match="cannot be read"):
        read_prompts(path)
    path.write_text("only one\n\nonly one\n")
    with pytest.raises(BadConfig, match="at least two different"):
        read_prompts(path)
    path.write_text(" a \r\nb\n")
    assert read_prompts(path) == ("a", "b")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="cannot be read"):
        read_prompts(path)
