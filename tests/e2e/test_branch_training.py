"""A tenant's branch that is trained, in real processes: it learns from its tenant alone, who teaches nobody else, and survives kill -9."""

import asyncio
import contextlib
import inspect
import os
import re
import signal

import aiohttp
from rich.console import Console
from tests.deadlines import LEARNING_S

from ostinato.app.branches import branch_config
from ostinato.app.storage import home, open_log, open_store
from ostinato.core.records import Arm, Batch, ReleaseEvent, Turn
from ostinato.launch.commands.release import ship, ship_branch
from ostinato.status.progress_lines import Lines
from ostinato.train.checkpoint import newest_step

KEYS = {"acme": "sk-acme-0123456789abcdef", "bolt": "sk-bolt-0123456789abcdef"}
LIKED = {"acme": "^[a-z]", "bolt": "^[^a-z]"}  # opposite wishes


async def wait_for(holds):
    """Wait until a condition, or what a coroutine function returns, is true; returns it."""
    async with asyncio.timeout(LEARNING_S):
        while True:
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.2)


def tenants(*more):
    keys = ", ".join(f"'{tenant}:{key}'" for tenant, key in KEYS.items())
    return (
        f"serve.api_keys=[{keys}]",
        "serve.branches=['acme']",
        "serve.branch_holdout=0.25",
        "serve.control_share=0.0",
        "learn.tenants=['acme']",
        "learn.batch=16",
        *more,
    )


async def person(url, tenant, number, until, told):
    """Somebody of a tenant, who asks, judges the answer by the tenant's wish, and goes on after any failure."""
    headers, count, model = {"x-api-key": KEYS[tenant]}, 0, ""
    async with aiohttp.ClientSession(url, headers=headers) as session:
        while not until.is_set():
            count += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
                if not model:
                    async with session.get("/health") as response:
                        model = (await response.json())["model"]
                question = [{"role": "user", "content": f"{tenant} says {count % 7}"}]
                body = {"model": model, "user": f"{tenant}-{number}", "messages": question, "max_tokens": 6}
                async with session.post("/v1/chat/completions", json=body) as response:
                    reply = await response.json()
                text, turn = reply["choices"][0]["message"]["content"] or "", reply["ostinato"]["turns"][0]
                name = "accepted" if re.search(LIKED[tenant], text) else "rejected"
                event = {"id": f"{tenant}-{number}-{count}", "target": turn, "name": name, "value": True}
                async with session.post("/v1/feedback", json=event | {"source": "human"}) as response:
                    assert response.status == 202, await response.text()
                told.append(turn)


@contextlib.asynccontextmanager
async def crowds(url, each=6):
    until, told = asyncio.Event(), []
    tasks = [asyncio.create_task(person(url, tenant, n, until, told)) for tenant in KEYS for n in range(each)]
    try:
        yield told
    finally:
        until.set()
        await asyncio.gather(*tasks)


async def rows(config, *kinds):
    with open_log(config) as log:
        return [row async for _, row in log.read(0, {*kinds})]


def published(config):
    return [line for line in Lines(home(config).progress("train")).new() if line["kind"] == "published"]


async def shipped(config):
    return [row for row in await rows(config, ReleaseEvent) if row.action == "shipped" and row.previous]


async def begun_anew(config):
    """The step from which training goes on at a version of another line, if it was taken since the first."""
    found = [row for row in await rows(config, Batch) if row.base is not None]
    return found[-1] if len(found) > 1 else None


async def test_it_learns_from_its_tenant_alone_and_survives_a_kill(tmp_path, running):
    run = await running(tmp_path, *tenants())
    branch = branch_config(run.config, "acme")
    try:
        async with crowds(run.url):
            await wait_for(lambda: len(published(branch)) >= 2)
            worker = run.worker("train@acme")
            os.kill(worker.process.pid, signal.SIGKILL)
            known = len(published(branch))
            await wait_for(lambda: len(published(branch)) >= known + 2)
            await wait_for(lambda: len(published(run.config)) >= 2)
            await wait_for(lambda: shipped(branch))
            judged = [row for row in await rows(branch, ReleaseEvent) if row.action == "evaluated"]
            # a person puts a version of the shared line there
            line = published(run.config)[-1]
            await ship_branch(run.config, line["hash"][:20], "acme", "op", Console(quiet=True))
            anew = await wait_for(lambda: begun_anew(branch))
            await wait_for(lambda: published(branch)[-1]["number"] > anew.step)
    finally:
        await run.stop()
    served = {turn.id: turn for turn in await rows(run.config, Turn)}
    copied = {turn.id: turn for turn in await rows(branch, Turn)}
    assert {turn.tenant for turn in copied.values()} == {"acme"}
    assert {served[turn].arm for turn in copied} == {Arm.BRANCH, Arm.SHARED}
    own = [turn for batch in await rows(branch, Batch) for turn in batch.turns]
    shared = [turn for batch in await rows(run.config, Batch) for turn in batch.turns]
    assert len(own) == len(set(own)) > 0
    assert {(served[turn].tenant, served[turn].arm) for turn in own} == {("acme", Arm.BRANCH)}
    assert {served[turn].tenant for turn in shared} == {"bolt"}
    assert judged, "what was shipped had passed the gate"
    asked = {(turn.arm, span.policy.hash) for turn in served.values() for span in turn.spans}
    assert all((Arm.EVAL, row.policy.hash) in asked for row in judged), "through the shared gateway"
    assert (anew.base.number, anew.base.hash) == (line["number"], line["hash"])
    assert anew.turns == ()
    assert (await open_store(run.config).refs())["branches/acme/base"] == line["hash"], "it is kept near where it began"
    lines = published(branch)
    assert min(each["number"] for each in lines if each["at"] > anew.at) > max(anew.step, anew.base.number)
    assert len({line["number"] for line in lines}) == len({(line["number"], line["hash"]) for line in lines})
    own_roots = {each["hash"] for each in lines}
    assert {row.policy.hash for row in (await shipped(branch))[:1]} <= own_roots
    assert {row.policy.hash for row in await rows(run.config, ReleaseEvent)}.isdisjoint(own_roots)


async def test_it_begins_at_a_version_that_was_trained_and_goes_on_above_its_number(tmp_path, running):
    alone = [word for word in tenants() if "branch" not in word and "learn.tenants" not in word]
    run = await running(tmp_path, *alone, "evaluate.suite=''")
    try:
        async with crowds(run.url):
            await wait_for(lambda: len(published(run.config)) >= 2)
            await wait_for(lambda: newest_step(home(run.config).checkpoints) >= 3)
            line = published(run.config)[0]
            await ship(run.config, line["hash"][:20], "", "op", Console(quiet=True))
    finally:
        await run.stop()
    shared = newest_step(home(run.config).checkpoints)
    run = await running(tmp_path, *tenants(), "evaluate.suite=''")
    branch = branch_config(run.config, "acme")
    try:
        async with crowds(run.url):
            await wait_for(lambda: len(published(branch)) >= 2)
    finally:
        await run.stop()
    batches = await rows(branch, Batch)
    assert (batches[0].base.hash, batches[0].turns) == (line["hash"], ())
    assert batches[0].step >= shared + 1 > line["number"]
    assert [batch.step for batch in batches] == list(range(batches[0].step, batches[0].step + len(batches)))
    served = {turn.id: turn for turn in await rows(run.config, Turn)}
    own = [turn for batch in batches for turn in batch.turns]
    assert {(served[turn].tenant, served[turn].arm) for turn in own} == {("acme", Arm.BRANCH)}
    assert {span.policy.hash for turn in own for span in served[turn].spans} == {line["hash"]}, (
        "no suite, nothing ships"
    )
    steps = [each for each in Lines(home(branch).progress("train")).new() if each["kind"] == "step"]
    assert steps[0]["on_policy"] > 0.9, "the first step's turns were made by the very weights that it starts from"
