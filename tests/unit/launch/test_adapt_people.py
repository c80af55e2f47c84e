"""`ostinato adapt show`, `reset` and `status`: beside a gateway and without one, from its cache or from the log alone."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.unit.adapt.people import BASIS, about, set_dials, steered_turn

from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.learner import names_hash
from ostinato.adapt.prior import Population
from ostinato.adapt.privacy import gaussian_sigma
from ostinato.adapt.styles import styles_of
from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.errors import NotFound
from ostinato.core.records import Consent, ConsentGiven, Pick, ReleaseEvent, Reward, SteeringBasis
from ostinato.core.steering import DialSet, SetBy
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.adapt import reset, show, status
from ostinato.launch.commands.doctor import CHECKS
from ostinato.launch.commands.log import line, print_log
from ostinato.launch.views.progress import Progress
from ostinato.record.person_cache import SqlPersonCache
from ostinato.run_directory import Home
from ostinato.status.dials import REFUSED
from ostinato.weights.publish.publisher import VersionPublisher

ANN = ("acme", "ann")
KEYS = "serve.api_keys=['acme:sk-0123456789abcdef']"


def settings(tmp_path, *more):
    return load(None, [f"run.directory={tmp_path / 'run'}", KEYS, "adapt={mode='dials', holdout=0.0}", *more])


async def fill(log):
    turns = [steered_turn(f"t{k}:0", ANN, 10.0 + k) for k in range(8)]
    ratings = [about(turn, f"s{k}", value=0.0) for k, turn in enumerate(turns)]
    await log.append(SteeringBasis.of(BASIS, at=1.0), *turns, *ratings, set_dials("d", ANN, 30.0, lists=-1.5))
    await log.append(set_dials("e", ("acme", "bob"), 31.0, brief=1.0))


async def said(command, *given, **how):
    seen = io.StringIO()
    await command(*given, Console(file=seen, width=160), **how)
    return seen.getvalue()


async def shown(config, user="ann"):
    return json.loads(await said(show, config, "acme", user, machine=True))


@pytest.mark.parametrize("encrypt", ["none", "user"])
async def test_a_person_is_shown_and_reset_whether_a_gateway_has_saved_or_not(tmp_path, encrypt):
    config = settings(tmp_path, f"record.encrypt={encrypt}")
    with open_log(config) as log:
        await fill(log)
        alone = await shown(config)
        assert [dial["set"] for dial in alone["dials"]] == [None, -1.5, None]
        assert (alone["user"], alone["ratings"], alone["off"]["reason"]) == ("ann", 8, "basis")
        gateway = SqlPersonCache(Home(config.run.directory).people, log.keys, config.record.encrypt, most=100)
        adaptation = DialAdaptation(log, gateway, config.adapt)
        await adaptation.follow()
        await adaptation.fold.save()
        before = Home(config.run.directory).people.read_bytes()
        assert await shown(config) == alone, "from what it has saved"
        await log.append(set_dials("f", ANN, 40.0, brief=0.25))
        assert [dial["set"] for dial in (await shown(config))["dials"]] == [0.25, -1.5, None], "and from later rows"
        counted = json.loads(await said(status, config, machine=True))
        assert (counted["people"], counted["mode"], counted["live_has_basis"]) == (2, "dials", False)
        assert counted["bases"] == [{"hash": BASIS.hash, "weights": BASIS.weights, "dials": list(BASIS.names)}]
        assert "all dials are at the prior" in await said(reset, config, *ANN)
        assert Home(config.run.directory).people.read_bytes() == before, "the gateway's own file is not touched"
        await adaptation.follow()
        view = adaptation.view(ANN, weights=BASIS.weights)
        assert ([dial.held for dial in view.dials], view.ratings) == ([None] * 3, 0)
        assert [dial.held for dial in adaptation.view(("acme", "bob"), weights="").dials] == [1.0, None, None]
        gateway.close()
    after = await shown(config)
    assert (after["ratings"], [dial["set"] for dial in after["dials"]]) == (0, [None] * 3)
    assert after["last_reset"] is not None
    with open_log(config) as log:
        (row,) = [row for _, row in log.tail(1, {DialSet})]
        assert (row.person, row.dials, row.by) == (ANN, {}, SetBy.OPERATOR)
    assert (tmp_path / "run" / "audit.jsonl").read_text().count('"reset dials"') == 1


async def test_a_basis_that_the_gateway_refuses_and_a_trial_without_one_are_known(tmp_path):
    config = settings(tmp_path)
    with open_run(config) as run:
        publisher = VersionPublisher(run.store, config.publish)
        hashes = []
        for number, ref in ((0, "live"), (1, "canary")):
            weights = {"w": WeightArray("BF16", (4,), np.full(8, number, np.uint8))}
            done = await publisher.publish(number, weights, run="r", base=None, meta={"step": number}, ref=ref)
            hashes.append(done.policy)
        live, canary = hashes
        await fill(run.log)
        await run.log.append(SteeringBasis.of(replace(BASIS, weights=live.hash), at=2.0))
        assert (await shown(config))["off"] is None
        progress = Progress(run.home.progress("serve"))
        progress.bases([live.hash])
        assert (await shown(config))["off"]["reason"] == "basis"
        progress.bases([])
        assert (await shown(config))["off"] is None
        shipped = ReleaseEvent(id="r0", action="shipped", policy=live, previous=None, reason="", detail={}, at=3.0)
        detail = {"share": 0.1, "salt": "s"}
        begun = ReleaseEvent(id="r1", action="canary", policy=canary, previous=live, reason="", detail=detail, at=4.0)
        await run.log.append(shipped, begun)
        assert (await shown(config))["off"]["reason"] == "trial"
        await run.log.append(SteeringBasis.of(replace(BASIS, weights=canary.hash), at=5.0))
        assert (await shown(config))["off"] is None, "each release has one"
        progress.bases([canary.hash])
        assert (await shown(config))["off"]["reason"] == "trial"
        look = dict(CHECKS)["dials"]
        open_ = config.model_copy(update={"adapt": config.adapt.model_copy(update={"users": "declared"})})
        assert REFUSED not in await asyncio.to_thread(look, open_)
        progress.bases([live.hash])
        assert REFUSED in await asyncio.to_thread(look, open_)


async def test_what_people_read_is_one_screen(tmp_path):
    config = settings(tmp_path)
    with open_log(config) as log:
        await fill(log)
        await log.append(ConsentGiven(id="c", tenant="acme", user="bob", level=Consent.AGGREGATE, at=50.0))
    words = await said(show, config, "acme", "ann")
    assert "fewer lists, set by hand" in words
    assert "8 ratings" in words
    assert "ostinato adapt fit" in words
    assert "does not allow it" in await said(show, config, "acme", "bob")
    assert "adapt.mode is 'off'" in await said(show, settings(tmp_path, "adapt={mode='off'}"), "acme", "ann")
    forged = await said(show, config, "acme", "ann\x1b[2J")
    assert "\x1b" not in forged
    words = await said(status, config)
    assert "mode dials: users that their tenant signs; 0% of people are held out" in words
    assert "1 people with a state" in words
    assert "has no basis: run `ostinato adapt fit`" in words
    assert "fitted to" in words


async def test_without_a_basis_no_empty_table_of_bases_is_shown(tmp_path):
    config = settings(tmp_path)
    open_log(config).close()
    words = await said(status, config)
    assert "has no basis: run `ostinato adapt fit`" in words
    assert "fitted to" not in words


async def test_status_tells_what_priors_have_spent_of_their_privacy_budget(tmp_path):
    config = settings(tmp_path, "adapt.privacy={epsilon=2.0, releases=4}")
    with open_log(config) as log:
        await fill(log)
        names, at = names_hash(BASIS.names), wall_clock()
        await log.append(
            replace(Population.flat(3).row(names=names, number=1, upto=0, at=at), sigma=gaussian_sigma(2.0, 1e-6) * 2),
            Population.flat(3).row(names="9c", number=2, upto=0, at=at),
        )
    words = await said(status, config)
    assert " of 2 (delta 1e-06) spent in 365 days, by 1 of 4 releases; 1 more without noise, which no" in words
    told = json.loads(await said(status, config, machine=True))["privacy"]
    assert 0.0 < told.pop("spent") < 1.0
    assert told == {"epsilon": 2.0, "delta": 1e-6, "releases": 4, "released": 1, "without_noise": 1}
    assert "noise multiplier" in await said(print_log, config, "priors", 2)
    assert json.loads(await said(status, settings(tmp_path), machine=True))["privacy"] is None


async def test_styles_are_shown_with_their_effects_and_only_where_there_are_any(tmp_path):
    styled = settings(tmp_path, "adapt.styles.prompts={concise='Be brief.'}")
    (style,) = styles_of(styled.adapt)
    with open_log(styled) as log:
        await fill(log)
        for number in range(24):
            arm = style.arm if number % 2 else "none"
            turn = steered_turn(f"styled{number}:0", ("acme", "ann" if number % 3 else "bob"), 100.0 + number)
            turn = replace(turn, steered=None, style=Pick(arm=arm, odds={"none": 0.5, style.arm: 0.5}))
            value = float(number % 2)
            reward = Reward(turn=turn.id, value=value, function="f@1", signals=(), at=200.0)
            await log.append(turn, about(turn, f"styled{number}", value=value), reward)
    assert "style" not in await shown(settings(tmp_path))
    assert "styles" not in json.loads(await said(status, settings(tmp_path), machine=True))
    told = (await shown(styled))["style"]
    assert (told["off"]["reason"], told["ratings"]) == ("styles", 16)
    assert [each["name"] for each in told["styles"]] == ["none", "concise"]
    assert told["styles"][1]["low"] > 0.0
    assert "not approved" in await said(show, styled, "acme", "ann")
    (row,) = json.loads(await said(status, styled, machine=True))["styles"]
    assert (row["arm"], row["approved"], row["turns"], row["rated"], row["gain"][0]) == (style.arm, False, 12, 12, 1.0)
    assert "+1.000" in await said(status, styled)


async def test_a_run_or_a_tenant_that_is_not_there_is_refused(tmp_path):
    config = settings(tmp_path)
    for command, given in ((show, ANN), (reset, ANN), (status, ())):
        with pytest.raises(NotFound, match="ostinato up"):
            await said(command, config, *given)
    with open_log(config):
        pass
    for command in (show, reset):
        with pytest.raises(NotFound, match="tenant 'amce'"):
            await said(command, config, "amce", "ann")
    assert (await shown(config))["dials"] == []


async def test_a_damaged_cache_is_passed_over(tmp_path):
    config = settings(tmp_path)
    with open_log(config) as log:
        await fill(log)
    expected = await shown(config)
    place: Path = Home(config.run.directory).people
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"no database" * 200)
    place.with_suffix(".key").write_text("00" * 32)
    assert await shown(config) == expected


async def test_the_log_is_printed_with_the_dials_that_people_set(tmp_path):
    config = settings(tmp_path)
    with open_log(config) as log:
        await fill(log)
    lines = (await said(print_log, config, "dials", 2)).splitlines()
    assert lines[0].endswith("acme  ann  by person  lists -1.5")
    row = set_dials("f", ANN, 1.0, brief=None)
    assert line(row).endswith("brief prior")
    assert line(replace(row, dials={})).endswith("all to the prior")
    assert line(replace(row, dials=None)).endswith("forgotten")
