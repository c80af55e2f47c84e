from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from ostinato.app.storage import open_store
from ostinato.config import load
from ostinato.core.errors import BadConfig, BadRequest, NotFound, StorageFull
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.weights import (
    diff_versions,
    export_model,
    find_version,
    picture,
    print_chain,
    show_version,
)
from ostinato.web.weights_page import Row, render, shade
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.version.compare import TensorChange
from ostinato.weights.version.content import VERSIONS

NAMES = [f"model.layers.{n}.{kind}.weight" for n in range(4) for kind in ("self_attn.q_proj", "mlp.up_proj")]


def weights(step: int):
    """bf16 ones, of which layer n changed n elements per step."""
    found = {}
    for name in [*NAMES, "model.embed_tokens.weight"]:
        codes = np.full(512, 0x3F80, np.uint16)
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        codes[: layer * step] += step
        found[name] = WeightArray("BF16", (16, 32), codes.view(np.uint8))
    return found


@pytest.fixture
async def run(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    publisher, base, made = VersionPublisher(open_store(config)), None, []
    for step in range(3):
        done = await publisher.publish(step, weights(step), run="r", base=base, ref="live", meta={"loss": 0.25})
        base = done.policy
        made.append(base)
    return config, made


def console() -> Console:
    return Console(record=True, width=160)


async def test_show_says_what_a_version_is_made_of(run):
    config, made = run
    for name in ("live", "v2", "2", made[2].hash[:10]):
        out = console()
        await show_version(config, name, out)
        text = out.export_text()
        assert made[2].hash in text
        assert "delta, 2 deltas after a full snapshot" in text
        assert "equal" in text
        assert "0.25" in text


async def test_a_root_of_which_only_digits_are_given_is_found(run, monkeypatch):
    config, made = run
    digits = "".join(each for each in made[1].hash if each.isdecimal())[:6]
    store = open_store(config)
    for policy in made:
        if policy != made[1]:
            assert not policy.hash.startswith(digits)
    every = await store.refs()
    refs = {"live": every["live"], VERSIONS + digits + made[1].hash[6:]: every[VERSIONS + made[1].hash]}

    async def renamed(_):
        return refs

    monkeypatch.setattr(type(store), "refs", renamed)
    assert (await find_version(config, digits)).policy == made[1]


async def test_what_a_publisher_wrote_of_a_version_is_shown_as_it_is(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    meta = {"[/note]": "a[/b] [bold]c", "clear": "\x1b[2J"}
    named = "r[/run]\x9b2J"
    await VersionPublisher(open_store(config)).publish(0, weights(0), run=named, base=None, ref="live", meta=meta)
    out = console()
    await show_version(config, "live", out)
    text = out.export_text()
    for part in ("[/note]", "a[/b] [bold]c", "\\x1b[2J", "v0 of run r[/run]\\x9b2J"):
        assert part in text


async def test_a_place_that_cannot_be_written_is_an_error_in_a_line(run, tmp_path):
    config, _ = run
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(BadConfig, match="is a file"):
        await export_model(config, "live", file, console())
    with pytest.raises(StorageFull, match="cannot be written"):
        await diff_versions(config, "v0", "v1", file / "page.html", console())
    assert file.read_text() == "mine"
    await diff_versions(config, "v0", "v1", tmp_path / "new" / "page.html", console())
    assert (tmp_path / "new" / "page.html").exists()


async def test_sizes_that_are_alike_are_compared_to_a_tenth(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 0x7F80, 4096, np.uint16) | generator.integers(0, 2, 4096, np.uint16) << 15  # finite
    noise = WeightArray("BF16", (64, 64), codes.view(np.uint8))
    await VersionPublisher(open_store(config)).publish(0, {"w": noise}, run="r", base=None, ref="live", meta={})
    shown, chain = console(), console()
    await show_version(config, "live", shown)
    await print_chain(config, "live", chain)
    assert ": 1.0 times smaller" in shown.export_text()
    assert " 1.0x" in chain.export_text()


async def test_diff_counts_what_changed_and_draws_it(run, tmp_path):
    config, _ = run
    out, page = console(), tmp_path / "diff.html"
    await diff_versions(config, "v0", "live", page, out)
    text = out.export_text()
    assert "24 of 4,608 elements changed (0.521%)" in text
    assert "embed_tokens" in text
    assert "self_attn.q_proj" in text
    assert "0.000% to 1.172%" in text
    html = page.read_text()
    HTMLParser().feed(html)
    assert html.count("<td title=") == 8
    assert "1.172% of 512 changed" in html


async def test_a_version_that_is_not_there_is_not_found(run):
    config, _ = run
    with pytest.raises(NotFound, match="give a ref"):
        await show_version(config, "v9", console())
    with pytest.raises(NotFound, match="live"):
        await show_version(config, "no-such", console())
    with pytest.raises(
        NotFound, match=r"there is no candidate yet: `ostinato status` says what the trainer waits for.*\(live\)"
    ):
        await show_version(config, "candidate", console())


async def test_a_number_that_stands_for_two_versions_is_refused(run):
    config, _ = run
    await VersionPublisher(open_store(config)).publish(2, weights(7), run="other", base=None)
    with pytest.raises(BadRequest, match="2 versions match"):
        await show_version(config, "v2", console())


def test_little_is_drawn_too_and_nothing_is_not():
    assert shade(0.0, 0.5) == 0.0
    assert 0 < shade(1e-9, 0.5) < shade(0.01, 0.5) < shade(0.5, 0.5) == 1.0
    changes = [TensorChange(name=f"l.{n}.a", elements=1000, changed=n, moved=None) for n in (0, 1, 1000)]
    (line,) = picture(changes)
    blocks = line.plain.split("  ")[1]
    assert (blocks[0], blocks[-1], len(blocks)) == (" ", "█", 3)


def test_names_cannot_write_into_the_page():
    row = Row(name='<script>"x', layer=0, kind="<b>", share=0.5, elements=2, moved=None)
    assert "<script>" not in render("<t>", "<l>", [row])
    assert "<b>" not in render("<t>", "<l>", [row])
