"""What a forgotten person wrote, or what must not be kept, is in no file of the run: not as it was, not compressed, not while the run is up
and not after.
"""

import asyncio

import aiohttp
from rich.console import Console
from tests.deadlines import WHOLE_PROGRAM_S
from tests.oracles.words_on_disk import where

from ostinato.app.storage import open_log
from ostinato.core.records import Consent, Holdback, Signal, Turn
from ostinato.launch.commands.log import forget

SAID, STOP = "zebrastripe in my kitchen", "quokkapatience"
COMMENT, CORRECTION, SCHEMA = "narwhalregret about it", "pelicanmethod instead", "capybaraschema"
WORDS = [SAID, STOP, COMMENT, CORRECTION, SCHEMA]


async def tell(url: str, number: int, headers: dict[str, str] | None = None, **fields: object) -> str:
    """One turn of the person, with feedback; returns the answer."""
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/health") as response:
            model = (await response.json())["model"]
        schema = {"type": "object", "properties": {SCHEMA: {"type": "string", "enum": [SCHEMA]}}}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {
            "model": model,
            "user": "ann",
            "messages": [{"role": "user", "content": f"{SAID} {number}"}],
            "stop": [STOP],
            "max_tokens": 8,
            **[{}, {"response_format": wanted}][number % 2],
            **fields,
        }
        async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
            reply = await response.json()
            assert response.status == 200, reply
        (turn,) = reply["ostinato"]["turns"]
        event = {"id": f"e{number}", "target": turn, "name": "accepted", "value": True, "source": "human"}
        event |= {"comment": COMMENT, "correction": CORRECTION}
        async with session.post("/v1/feedback", json=event) as response:
            assert response.status == 202, await response.text()
        async with session.get("/turns", headers={"Accept": "text/html"}) as response:  # the page fills its index
            await response.text()
    return reply["choices"][0]["message"]["content"] or ""


async def test_what_a_forgotten_person_wrote_is_in_no_file_of_the_run(tmp_path, running):
    more = ("record.encrypt='user'", "housekeeping.every_s=1", "reward.fold_rows=1", "record.segment_rows=40")
    run = await running(tmp_path, *more, names=("serve", "train", "housekeeping"))
    root = run.launched.home.root
    try:
        answers = [await tell(run.url, number) for number in range(12)]
        long = [answer for answer in answers if len(answer) >= 12]
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not {"page.sqlite", "status.fold", "desk.fold"} <= {path.name for path in root.glob("folds/*")}:
                await asyncio.sleep(0.2)
        with open_log(run.config) as log:
            kept = [row async for _, row in log.read(0, {Turn, Signal})]
        assert len([row for row in kept if isinstance(row, Turn) and row.sampling.stop == (STOP,)]) == 12
        assert len([row for row in kept if isinstance(row, Signal) and row.comment == COMMENT]) == 12
        assert await asyncio.to_thread(where, root, [*WORDS, *long]) == []  # encrypted from the start
        await forget(run.config, "default", "ann", Console(quiet=True))
        with open_log(run.config) as log:
            after = [row async for _, row in log.read(0, {Turn})]
        assert {(row.redacted, row.sampling.stop, row.sampling.grammar) for row in after if isinstance(row, Turn)} == {
            (True, (), "")
        }
        assert await asyncio.to_thread(where, root, [*WORDS, *long]) == []
    finally:
        await run.stop()
    assert await asyncio.to_thread(where, root, [*WORDS, *long]) == []


async def holdbacks(config) -> dict[str, str]:
    with open_log(config) as log:
        return {row.turn: row.reason async for _, row in log.read(0, {Holdback}) if isinstance(row, Holdback)}


async def test_what_must_not_be_kept_is_in_no_file_of_the_run(tmp_path, running):
    more = ("record.encrypt='none'", "housekeeping.every_s=1", "reward.fold_rows=1", "record.segment_rows=40")
    run = await running(tmp_path, *more, names=("serve", "train", "housekeeping"))
    root = run.launched.home.root
    never: list[dict[str, object]] = [{"headers": {"X-Ostinato-Train": "never"}}, {"store": False}]
    try:
        answers = [await tell(run.url, number, **never[number % 4 // 2]) for number in range(12)]
        long = [answer for answer in answers if len(answer) >= 12]
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while not {"page.sqlite", "status.fold", "desk.fold"} <= {path.name for path in root.glob("folds/*")}:
                await asyncio.sleep(0.2)
            while len(held := await holdbacks(run.config)) < 12:
                await asyncio.sleep(0.2)
        with open_log(run.config) as log:
            kept = [row async for _, row in log.read(0, {Turn, Signal})]
        turns = [row for row in kept if isinstance(row, Turn)]
        assert [(turn.consent, turn.redacted, turn.sampling.stop) for turn in turns] == [(Consent.NEVER, True, ())] * 12
        assert sum(span.tokens for turn in turns for span in turn.spans) > 0
        assert {row.comment for row in kept if isinstance(row, Signal)} == {None}
        assert await asyncio.to_thread(where, root, [*WORDS, *long]) == []
    finally:
        await run.stop()
    assert await asyncio.to_thread(where, root, [*WORDS, *long]) == []
    assert held == dict.fromkeys((turn.id for turn in turns), "consent:never")


async def test_the_search_finds_words_where_they_are_not_encrypted(tmp_path, running):
    run = await running(tmp_path, "record.encrypt='none'", names=("serve",))
    root = run.launched.home.root
    try:
        for number in range(6):
            await tell(run.url, number)
        assert {word for _, word in await asyncio.to_thread(where, root, WORDS)} >= {STOP, COMMENT, CORRECTION, SCHEMA}
    finally:
        await run.stop()
