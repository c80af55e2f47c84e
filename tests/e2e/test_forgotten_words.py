"""What a forgotten person wrote is in no file of the run: not as it was, not compressed, not while the run is up and not after."""

import asyncio
import contextlib
import json
import re
import zlib
from pathlib import Path

import aiohttp
import pysqlite3.dbapi2
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.core.records import Signal, Turn
from ostinato.launch.commands.log import forget
from ostinato.record.folds import unpack_fold
from ostinato.record.segments.segment import open_segment

SAID, STOP = "zebrastripe in my kitchen", "quokkapatience"
COMMENT, CORRECTION, SCHEMA = "narwhalregret about it", "pelicanmethod instead", "capybaraschema"
WORDS = [SAID, STOP, COMMENT, CORRECTION, SCHEMA]
WAIT_S = 120.0


async def tell(url: str, number: int) -> str:
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
        }
        async with session.post("/v1/chat/completions", json=body) as response:
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


def values(path: Path) -> list[bytes]:
    """Everything in a database as SQL sees it, unpacked as far as it can be without keys."""
    with contextlib.ExitStack() as stack:
        unpack = None
        if path.parent.name == "log":
            unpack = stack.enter_context(open_segment(path)).shrinker.unpack
        db = stack.enter_context(contextlib.closing(pysqlite3.dbapi2.connect(str(path))))
        found: list[bytes] = []
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            with contextlib.suppress(pysqlite3.dbapi2.DatabaseError):  # FTS5's own
                for value in (value for row in db.execute(f'SELECT * FROM "{table}"') for value in row):
                    found.append(value if isinstance(value, bytes) else str(value).encode())
                    if isinstance(value, bytes) and unpack is not None:
                        with contextlib.suppress(Exception):
                            found.append(unpack(value))
    return found


def contents(root: Path) -> dict[str, bytes]:
    """The files of a run, each followed by what is compressed in it."""
    found: dict[str, bytes] = {}
    for path in (path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        data = path.read_bytes()
        if path.suffix == ".fold":
            data += json.dumps(unpack_fold(data)[1], ensure_ascii=False).encode()
        if path.suffix in (".db", ".sqlite"):
            data += b"\n".join(values(path))
        for start in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):  # zlib, such as a grammar
            with contextlib.suppress(zlib.error):
                data += zlib.decompress(data[start.start() :])
        found[str(path.relative_to(root))] = data
    return found


def where(root: Path, words: list[str]) -> list[tuple[str, str]]:
    return [(name, word) for name, data in contents(root).items() for word in words if word.encode() in data]


async def test_what_a_forgotten_person_wrote_is_in_no_file_of_the_run(tmp_path, running):
    more = ("record.encrypt='user'", "housekeeping.every_s=1", "reward.fold_rows=1", "record.segment_rows=40")
    run = await running(tmp_path, *more, names=("serve", "train", "housekeeping"))
    root = run.launched.home.root
    try:
        answers = [await tell(run.url, number) for number in range(12)]
        long = [answer for answer in answers if len(answer) >= 12]
        async with asyncio.timeout(WAIT_S):
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


async def test_the_search_finds_words_where_they_are_not_encrypted(tmp_path, running):
    run = await running(tmp_path, "record.encrypt='none'", names=("serve",))
    root = run.launched.home.root
    try:
        for number in range(6):
            await tell(run.url, number)
        assert {word for _, word in await asyncio.to_thread(where, root, WORDS)} >= {STOP, COMMENT, CORRECTION, SCHEMA}
    finally:
        await run.stop()
