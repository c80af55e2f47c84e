"""The attacks: one table of what is sent, how often, and which answers are right. None of them may cost anybody else anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zstandard
from tests.examinations.siege.wire import Answer, Target, answer, request
from tests.fakes.worst_bodies import COUNT, bodies

MODEL = "tiny"
CHAT, FEEDBACK = "/v1/chat/completions", "/v1/feedback"
USER = [{"role": "user", "content": "hi"}]
EVENT = {"name": "accepted", "value": True, "source": "human"}
INVISIBLE = "\u200b" * 65_536
UNPACKED = 64 << 20  # bytes that a compressed bomb would become
GROWS = {"type": "string", "pattern": "^(a?){300}a{300}$"}  # a grammar that grows while it is followed
FORM = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}
CROWD = 1_100  # connections from one address, of the 1,024 that it may have
CROWDED = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
HOLD_S = 20.0
PIPELINED = 1_000
EVIL = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}


@dataclass(slots=True, kw_only=True)
class Attacker:
    """One lane of an attack: whom it attacks, from which address."""

    target: Target
    source: str
    dice: random.Random = field(default_factory=random.Random)

    @property
    def keyed(self) -> dict[str, str]:
        return {"x-api-key": self.target.key}

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, keyed: bool = True
    ) -> Answer:
        own = self.keyed if keyed else {}
        return await self.target.ask(request(method, path, body, {**own, **(headers or {})}), self.source)


Play = Callable[[Attacker], Awaitable[Answer]]
Sent = tuple[str, str, bytes, Mapping[str, str]]  # method, path, body, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack. `play` makes one round of it; `right`: the outcomes that it may have; each of `lanes` pauses `pause_s` between rounds.
    `sources`: the addresses it comes from; by default one of its own.
    """

    name: str
    play: Play
    right: frozenset[str]
    lanes: int = 1
    pause_s: float = 0.1
    sources: Sequence[str] = ()


def attack(name: str, play: Play, right: str, **how: Any) -> Attack:
    """An attack whose right outcomes are the words of `right`."""
    return Attack(name=name, play=play, right=frozenset(right.split()), **how)


class Sending:
    """A round sends one of the requests that `make` returns. `ready` makes them, which takes seconds for some."""

    def __init__(self, make: Callable[[], Sequence[Sent]], *, keyed: bool = True) -> None:
        self._make, self._keyed = make, keyed
        self._made: Sequence[Sent] = ()

    def ready(self) -> None:
        self._made = self._make()

    async def __call__(self, attacker: Attacker) -> Answer:
        method, path, body, headers = attacker.dice.choice(self._made)
        return await attacker.send(method, path, body, headers, keyed=self._keyed)


def posted(path: str, body: Any, **headers: str) -> Sent:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return "POST", path, data, {name.replace("_", "-"): value for name, value in headers.items()}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, "max_tokens": 4, **fields}


# ------------------------------------------------------------ with a key: bodies


def long_prompts() -> list[Sent]:
    said = ("word " * 200_000, "7" * 1_000_000, "ab" * 120_000)
    return [posted(CHAT, chat(messages=[{"role": "user", "content": text}])) for text in said]


def worst(chosen: Callable[[str, str], bool]) -> Callable[[], list[Sent]]:
    """The worst bodies whose path and name are chosen."""

    def make() -> list[Sent]:
        return [posted(path, body | {"model": MODEL}) for path, name, body in bodies() if chosen(path, name)]

    return make


def nested_arguments(path: str, name: str) -> bool:
    return name.startswith("arguments: ")


def wrong_lists(path: str, name: str) -> bool:
    return path != FEEDBACK and name.endswith((": numbers", ": texts", ": empty objects"))


def many_messages(path: str, name: str) -> bool:
    return (path, name) == (COUNT, "4,000 short messages")


def brackets() -> list[Sent]:
    size = 2_000_000
    texts = [b"[" * size, b"[" + b"[]," * (size // 3) + b"[]]", b'{"a":' * (size // 5), b"[" + b"9" * size + b"]"]
    return [posted(path, text) for text in texts for path in (FEEDBACK, CHAT)]


def packed() -> list[Sent]:
    zeros = bytes(1 << 20)
    press = zstandard.ZstdCompressor().compressobj()
    bombs = {
        "gzip": b"".join(gzip.compress(zeros) for _ in range(UNPACKED >> 20)),
        "zstd": b"".join(press.compress(zeros) for _ in range(UNPACKED >> 20)) + press.flush(),
    }
    bombs["x-gzip"] = gzip.compress(bytes(UNPACKED), 1)
    paths = (FEEDBACK, CHAT, "/v1/logs")
    return [posted(path, data, content_encoding=name) for name, data in bombs.items() for path in paths]


def growing_grammars() -> list[Sent]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": GROWS}}
    field = {"type": "object", "properties": {"path": GROWS}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "a", "parameters": field}}]
    return [
        posted(CHAT, chat(response_format=form, max_tokens=512)),
        posted(CHAT, chat(tools=tools, tool_choice="required", max_tokens=512)),
        posted("/v1/responses", {"model": MODEL, "input": "hi", "text": {"format": {**form, "name": "x", "schema": GROWS}}}),
    ]  # fmt: skip


def many_samples() -> list[Sent]:
    """More than a tenant may have at once, and as many as the slow readers leave of them."""
    every = {"logprobs": True, "top_logprobs": 1}
    return [posted(CHAT, chat(n=128, max_tokens=480, **every)), posted(CHAT, chat(n=40, max_tokens=200, **every))]


# ------------------------------------------------------------ with a key: turns, feedback, pages


async def invisible_feedback(attacker: Attacker) -> Answer:
    event = EVENT | {"target": attacker.target.turn, "comment": INVISIBLE, "correction": INVISIBLE}
    return await attacker.send(*posted(FEEDBACK, [event] * 5))


async def own_pages(attacker: Attacker) -> Answer:
    path = attacker.dice.choice((f"/turns/{attacker.target.turn}", "/turns", "/turns?text=%E2%80%8B"))
    return await attacker.send("GET", path)


async def invented_turns(attacker: Attacker) -> Answer:
    noise = attacker.dice.randbytes(150).hex()
    targets = (f"chatcmpl-{attacker.dice.getrandbits(128):032x}:0" for _ in range(100))
    return await attacker.send(*posted(FEEDBACK, [EVENT | {"target": each, "comment": noise} for each in targets]))


async def slow_reader(attacker: Attacker) -> Answer:
    _, path, body, _ = posted(CHAT, chat(stream=True, n=4, max_tokens=400))
    async with attacker.target.connected(attacker.source, limit=2_048) as (reader, writer):
        writer.write(request("POST", path, body, attacker.keyed))
        status = (await reader.readuntil(b"\r\n")).split()[1].decode()
        for _ in range(int(HOLD_S)):
            if status != "200" or not await reader.read(256):
                break
            await asyncio.sleep(1.0)
        return Answer(status)


async def events(attacker: Attacker) -> Answer:
    async with attacker.target.connected(attacker.source) as (reader, writer):
        writer.write(request("GET", "/events?page=turns", headers=attacker.keyed))
        status = (await reader.readuntil(b"\r\n")).split()[1].decode()
        try:
            async with asyncio.timeout(HOLD_S):
                while status == "200" and await reader.read(1 << 16):
                    pass
        except TimeoutError:
            pass
        return Answer(status)


def held(head: Callable[[Attacker], bytes]) -> Play:
    """A round opens a connection, sends the beginning of a request and waits for what comes of it."""

    async def play(attacker: Attacker) -> Answer:
        return await attacker.target.ask(head(attacker), attacker.source)

    return play


def half_body(attacker: Attacker) -> bytes:
    key = attacker.dice.choice((attacker.keyed, {"x-api-key": "none"}))
    return request("POST", CHAT, headers={**key, "content-length": "999"}) + b'{"model"'


async def extended_chunks(attacker: Attacker) -> Answer:
    """Chunks of one byte with extensions of 16 KB, of which only the byte would be counted."""
    path, headers = attacker.dice.choice(((FEEDBACK, attacker.keyed), ("/sign-in", FORM)))
    given = {"host": "127.0.0.1", "content-type": "application/json", **headers, "transfer-encoding": "chunked"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    async with attacker.target.connected(attacker.source) as (reader, writer):
        writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode())
        for _ in range(400):
            writer.write(b"1;" + b"x" * 16_000 + b"\r\n \r\n")
            await writer.drain()
        return await answer(reader)


# ------------------------------------------------------------ without a key


def silent_sign_in(attacker: Attacker) -> bytes:
    return request("POST", "/sign-in", headers={**FORM, "content-length": "60000"}) + b"key=" * attacker.dice.choice(
        (0, 1)
    )


async def aborted_sign_in(attacker: Attacker) -> Answer:
    async with attacker.target.connected(attacker.source) as (_, writer):
        writer.write(silent_sign_in(attacker))
        await asyncio.sleep(0.005)
    return Answer("left")


def half_head(attacker: Attacker) -> bytes:
    heads = (b"GET /health HTTP/1.1\r\nhost: local", b"POST /v1/feedback HTTP/1.1\r\nx-more: ", b"G")
    return attacker.dice.choice(heads)


def long_head(attacker: Attacker) -> bytes:
    size = attacker.dice.choice((70_000, 150_000, 600_000))
    return request("GET", "/health", headers={"x-more": "y" * size})


async def pipelined(attacker: Attacker) -> Answer:
    """A thousand requests at once, of which more than may wait do."""
    async with attacker.target.connected(attacker.source) as (reader, writer):
        writer.write(request("GET", "/v1/models", headers=attacker.keyed) * PIPELINED)
        answers = [await answer(reader) for _ in range(PIPELINED)]
    return answers[-1]


async def unread(attacker: Attacker) -> Answer:
    """Requests without end, and no answer is read."""
    async with attacker.target.connected(attacker.source, limit=2_048) as (_, writer):
        while True:
            writer.write(request("GET", "/health") * 1_000)
            await writer.drain()


def wrong_keys() -> list[Sent]:
    keys = ({"x-api-key": "sk-wrong"}, {"authorization": "Basic YTpi"}, {"authorization": "Bearer " + "x" * 40}, {})
    paths = (("POST", CHAT, b"{}"), ("POST", FEEDBACK, b"{}"), ("GET", "/metrics", b""), ("GET", "/v1/models", b""))
    return [(*path, key) for path in paths for key in keys]


def wrong_sign_ins() -> list[Sent]:
    return [("POST", "/sign-in", f"key=guess{number}&back=/".encode(), FORM) for number in range(100)]


def other_sites() -> list[Sent]:
    form = FORM | EVIL
    return [
        ("POST", "/sign-in", b"key=guess", form),
        ("POST", "/rollback", b"reason=x", form),
        ("GET", "/turns", b"", EVIL),
        ("POST", FEEDBACK, b"{}", EVIL),
        ("OPTIONS", FEEDBACK, b"", EVIL | {"access-control-request-method": "POST"}),
    ]


def two_lengths(attacker: Attacker) -> bytes:
    """A request whose end a proxy and the server could see at different places."""
    hidden = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/feedback HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    both = head + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(hidden) + hidden
    return attacker.dice.choice(
        (
            both,
            head + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
            head + b"content-length: -1\r\n\r\nabcd",
            head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        )
    )


ATTACKS = (
    attack("feedback of invisible characters", invisible_feedback, "202 429", pause_s=1.0),
    attack("pages of that feedback", own_pages, "200 429", lanes=6, pause_s=0.2),
    attack("prompts of 1 MB", Sending(long_prompts), "400 429", lanes=2, pause_s=0.5),
    attack("arguments of nested lists", Sending(worst(nested_arguments)), "200 400 429", lanes=2, pause_s=0.5),
    attack("lists of wrong values", Sending(worst(wrong_lists)), "400 429", lanes=4, pause_s=0.2),
    attack("counting 3,999 messages", Sending(worst(many_messages)), "200 429", lanes=4),
    attack("feedback about invented turns", invented_turns, "202 429", lanes=2, pause_s=0.2),
    attack("128 samples with log-probabilities", Sending(many_samples), "200 400 429"),
    attack("grammars that grow", Sending(growing_grammars), "200 400 429", lanes=2),
    attack("nested and crowded JSON", Sending(brackets), "400 413 429", lanes=2, pause_s=0.5),
    attack("compressed bombs", Sending(packed), "400 413 429", lanes=2, pause_s=0.2),
    attack("slow readers", slow_reader, "200 429 closed", lanes=4),
    attack("streams of events", events, "200 503", lanes=24, pause_s=1.0),
    attack("bodies that do not come", held(half_body), "400 401 429", lanes=20, pause_s=1.0),
    attack("chunk extensions", extended_chunks, "closed 429", lanes=2, pause_s=0.2),
    attack("silent sign-ins", held(silent_sign_in), "408 closed", lanes=200),
    attack("aborted sign-ins", aborted_sign_in, "left", lanes=4, pause_s=0.05),
    attack("half-open heads", held(half_head), "408 closed", lanes=200),
    attack("idle connections", held(lambda attacker: b""), "closed", lanes=len(CROWDED) * CROWD, pause_s=1.0, sources=CROWDED),
    attack("long heads", held(long_head), "431 closed", lanes=2),
    attack("pipelined requests", pipelined, "closed", pause_s=0.5),
    attack("answers that nobody reads", unread, "closed", pause_s=0.5),
    attack("wrong keys", Sending(wrong_keys, keyed=False), "401", lanes=2, pause_s=0.05),
    attack("wrong keys in the form", Sending(wrong_sign_ins, keyed=False), "401", lanes=2, pause_s=0.05),
    attack("pages of other sites", Sending(other_sites, keyed=False), "303 401 403 405", lanes=2),
    attack("requests of two lengths", held(two_lengths), "400", lanes=2),
)  # fmt: skip
