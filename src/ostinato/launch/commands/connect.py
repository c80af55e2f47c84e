"""`ostinato connect`: sets an unmodified coding agent up to use the gateway. It shows what it would write, asks, and can undo it.

The gateway as an agent sees it: the models that it lists, and one small call in a dialect.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from ostinato.app.storage import Home
from ostinato.config import Config
from ostinato.core.errors import BadConfig, NotFound, Unauthorized, Unavailable
from ostinato.launch.commands import settings_files
from ostinato.launch.commands.agent_settings import AGENTS, KEY_VARIABLE, Agent, Aim, Dialect, Json, Scope, Surroundings
from ostinato.launch.commands.settings_files import agreed, diff, hidden, masked, say, show
from ostinato.launch.views.screen import plain
from ostinato.status.gateway_address import read_address

# ---------------------------------------------------------------- the gateway


_MOST_BYTES = 1024 * 1024
_MOST_CHARS = 300  # of an error's text
_LOOK_S = 15.0
_CALL_S = 180.0  # enough for a model that is still loading on a slow machine
_TOKENS = 16

_CALLS: Mapping[Dialect, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": _TOKENS}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": _TOKENS}),
    "responses": ("/v1/responses", {"input": "Say hello.", "max_output_tokens": _TOKENS, "store": False}),
}
_REMEDIES = {
    400: "look at --model and --dialect",
    401: "give the gateway's key as OSTINATO_API_KEY or with --key",
    403: "give another key as OSTINATO_API_KEY or with --key",
    404: "look at --url and --model; a gateway of an older version may not speak this dialect",
    429: "try again in a moment",
    503: "try again in a moment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What the gateway reports of a captured call. A field that is not reported is None, such as `version` if an outside model answered."""

    turn: str
    request: str
    arm: str
    version: int | None
    root: str
    prompt_tokens: int | None
    answer_tokens: int | None


async def first_model(url: str, key: str | None) -> str:
    """The model that the gateway lists first. Raises Unavailable, Unauthorized, BadConfig."""
    body, _ = await _ask(url, key, "/v1/models", None, _LOOK_S)
    listed: object = body.get("data")
    names = (
        [each.get("id") for each in cast(list[Any], listed) if isinstance(each, dict)]
        if isinstance(listed, list)
        else []
    )
    if not names or not isinstance(names[0], str):
        raise BadConfig(f"{url}/v1/models lists no model; is it a gateway's address? Name the model with --model")
    return names[0]


async def call(url: str, key: str | None, model: str, dialect: Dialect) -> Captured:
    """Make one small call. Raises Unavailable, Unauthorized, and BadConfig if it is refused, or answered but not captured."""
    path, question = _CALLS[dialect]
    body, headers = await _ask(url, key, path, {"model": model, **question}, _CALL_S)
    turn = headers.get("x-ostinato-turn", "")
    if not turn:
        raise BadConfig(f"{url} answered, but captured no turn (no X-Ostinato-Turn); give --url an Ostinato gateway")
    usage = cast(Json, found) if isinstance(found := body.get("usage"), dict) else {}
    version = headers.get("x-ostinato-policy", "")
    return Captured(
        turn=plain(turn),
        request=plain(headers.get("request-id", "")),
        arm=plain(headers.get("x-ostinato-arm", "")),
        version=int(version) if version.isdecimal() else None,
        root=plain(headers.get("x-ostinato-weights", "")),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        answer_tokens=_count(usage, "completion_tokens", "output_tokens"),
    )


def _count(usage: Json, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := usage.get(name), int)), None)


async def _ask(
    url: str, key: str | None, path: str, body: Json | None, timeout_s: float
) -> tuple[Json, Mapping[str, str]]:
    """Make a request; returns the JSON object and the response's headers. The key goes to this address only: no redirect is followed."""
    headers = {"anthropic-version": "2023-06-01"} | ({"Authorization": f"Bearer {key}"} if key else {})
    method = "GET" if body is None else "POST"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
            http.request(method, f"{url}{path}", json=body, allow_redirects=False) as response,
        ):
            raw = await _bounded(response)
            answered, status = response.headers, response.status
    except TimeoutError as error:
        raise Unavailable(f"{url} gave no answer within {timeout_s:g} s; look at `ostinato status`") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = f"{type(error).__name__}: {plain(hidden(str(error), key))}"
        raise Unavailable(
            f"{url} cannot be reached ({why}); start it with `ostinato up`, or name another with --url"
        ) from error
    if status != 200:
        raise _refusal(f"{url}{path}", status, raw, key)
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadConfig(f"{url}{path} answered with something else than a JSON object; is --url a gateway's?")
    return cast(Json, value), answered


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = b""
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return raw


def _refusal(where: str, status: int, raw: bytes, key: str | None) -> BadConfig | Unauthorized | Unavailable:
    try:
        said = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = raw.decode(errors="replace")
    words = plain(hidden(" ".join(str(said).split()), key))[:_MOST_CHARS]
    kind = Unauthorized if status == 401 else Unavailable if status >= 500 or status == 429 else BadConfig
    remedy = _REMEDIES.get(status, "the gateway's output says why" if status >= 500 else "look at --url")
    return kind(f"{where} answered {status}: {words}; {remedy}")


# ---------------------------------------------------------------- the command


_KEY = re.compile(r"[A-Za-z0-9._~+/=:@-]{1,512}")
_MODEL = re.compile(r"[\w.:/@+-]{1,200}")
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options given on the command line.

    Attributes:
        url: the gateway's URL; None: that of the run's gateway.
        key: the gateway's key; None: the environment's, or none.
        model: the model's name; None: the first that the gateway lists.
        session: the session that all calls belong to.
        scope: settings for the user, or for the current directory.
        telemetry: have the agent send its log events to the gateway, too.
        yes: do not ask.
    """

    url: str | None = None
    key: str | None = None
    model: str | None = None
    session: str | None = None
    scope: Scope = "user"
    telemetry: bool = False
    yes: bool = False


def surroundings() -> Surroundings:
    """The surroundings of this process. Raises BadConfig if the current directory is gone."""
    try:
        return Surroundings(env=dict(os.environ), directory=Path.cwd(), mac=sys.platform == "darwin")
    except FileNotFoundError as error:
        raise BadConfig("the current directory is gone; change to another") from error


async def connect(config: Config, name: str, wishes: Wishes, at: Surroundings, console: Console) -> None:
    """Write an agent's settings, once a person has agreed.

    Raises:
        BadConfig: an option or a settings file cannot be used.
        NotFound: no gateway runs.
        Unavailable, Unauthorized: the gateway does not say which model it has.
        Conflict: the file was changed while a person was asked.
        StorageFull: the file cannot be written.
    """
    agent = _agent(name)
    if wishes.telemetry and not agent.telemetry:
        able = " and ".join(each for each, known in AGENTS.items() if known.telemetry)
        raise BadConfig(f"--telemetry: {name} cannot send it so; {able} can. Leave it out")
    found = _look(name, agent, wishes.scope, at) if agent.places else None
    aim = await _aim(config, wishes, at)
    if found is None:
        say(console, agent.hints(aim, ""))
        return
    try:
        text = agent.settings(found.base, aim)
    except BadConfig as error:
        raise BadConfig(f"{found.path}: {error}") from error
    _propose(found, text, aim, console)
    if _is_written(found, text, aim):
        say(console, ["nothing to change: it is connected already"])
    elif not agreed(console, "write this?", yes=wishes.yes):
        return
    else:
        settings_files.write(found, text, secret=_secret(text, aim))
        say(console, [_written_words(name, found, wishes)])
    exports = agent.exports(aim).items()
    say(console, [f"export {variable}={masked(value)}  # in full, where it starts" for variable, value in exports])
    say(console, agent.hints(aim, text))


def undo(name: str, wishes: Wishes, at: Surroundings, console: Console) -> None:
    """Put back what was there before `connect`. Raises NotFound, Conflict if the file was changed since, BadConfig."""
    agent = _agent(name)
    if not agent.places:
        raise NotFound(f"nothing to undo: no file is written for {name}; switch its settings off by hand")
    found = _look(name, agent, wishes.scope, at)
    backup = settings_files.restored(found)
    show(console, diff(str(found.path), found.text, backup.before, _key(wishes, at)))
    if agreed(console, "put this back?", yes=wishes.yes):
        settings_files.undo(found)
        say(console, [f"{found.path} is as it was before"])


async def check_capture(config: Config, dialect: Dialect, wishes: Wishes, at: Surroundings, console: Console) -> None:
    """Make one small call and print how it was captured. Raises NotFound, Unavailable, Unauthorized, BadConfig."""
    aim = await _aim(config, wishes, at)
    seen = await call(aim.url, aim.key, aim.model, dialect)
    made = f"v{seen.version} {seen.root[:16]}".rstrip() if seen.version is not None else "none of this run's"
    tokens = " and ".join(
        f"{count} of the {which}"
        for which, count in (("prompt", seen.prompt_tokens), ("answer", seen.answer_tokens))
        if count is not None
    )
    say(
        console,
        [
            f"{aim.url} speaks {dialect}, model {aim.model}",
            f"turn     {seen.turn}" + (f"  (request {seen.request})" if seen.request else ""),
            f"weights  {made}" + (f"  (arm {seen.arm})" if seen.arm else ""),
            f"tokens   {tokens or 'not told'}",
        ],
    )


def _agent(name: str) -> Agent:
    agent = AGENTS.get(name)
    if agent is None:
        raise BadConfig(f"no agent {name!r} is known; there are {', '.join(AGENTS)}")
    return agent


def _look(name: str, agent: Agent, scope: Scope, at: Surroundings) -> settings_files.SettingsFile:
    place = agent.places.get(scope)
    if place is None:
        raise BadConfig(f"--scope {scope}: {name} takes these settings for a user only; leave it out")
    # the links of a cloned repository may lead anywhere, so they are bounded; a person's own links are their own affair
    return settings_files.look(place(at), within=at.directory if scope == "project" else None)


async def _aim(config: Config, wishes: Wishes, at: Surroundings) -> Aim:
    key = _key(wishes, at)
    url = _running(config) if wishes.url is None else _address(wishes.url)
    if wishes.session is not None:
        if not _SESSION.fullmatch(wishes.session):
            raise BadConfig(
                f"--session {wishes.session!r}: 1-128 letters, digits, '.', '_' and '-', a letter or digit first"
            )
        url = f"{url}/s/{wishes.session}"
    model = wishes.model or await first_model(url, key)
    if not _MODEL.fullmatch(model):
        raise BadConfig(f"the model's name {model[:200]!r} cannot be put into settings; name another with --model")
    return Aim(url=url, key=key, model=model, telemetry=wishes.telemetry)


def _key(wishes: Wishes, at: Surroundings) -> str | None:
    key = at.env.get(KEY_VARIABLE) if wishes.key is None else wishes.key
    if key and not _KEY.fullmatch(key):
        raise BadConfig(
            f"the key of --key or {KEY_VARIABLE} has characters that no key has; look for blanks and quotes"
        )
    return key or None


def _running(config: Config) -> str:
    url = read_address(Home(config.run.directory).address)
    if url is None:
        raise NotFound(
            f"no gateway runs for {config.run.directory}; start it with `ostinato up`, or name one with --url"
        )
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _address(text: str) -> str:
    """The gateway's URL without ``/v1``. Raises BadConfig."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, fine = None, False
    if parts is None or not fine or not text.isprintable() or set(text) & set(" \"'\\$`"):
        raise BadConfig("--url: write it as http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadConfig("--url takes no user, question or fragment; give the key as OSTINATO_API_KEY or with --key")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _secret(text: str, aim: Aim) -> bool:
    return aim.key is not None and aim.key in text


def _is_written(found: settings_files.SettingsFile, text: str, aim: Aim) -> bool:
    """True if the file is already as it should be, permissions included."""
    closed = found.mode is not None and not found.mode & 0o077
    return found.text == text and (closed or not _secret(text, aim))


def _propose(found: settings_files.SettingsFile, text: str, aim: Aim, console: Console) -> None:
    if found.real != found.path:
        say(console, [f"{found.path} leads to {found.real}"])
    show(console, diff(str(found.path), found.text, text, aim.key))
    if _secret(text, aim):
        say(console, [f"{found.path} is readable by its owner only (0600): it holds your key. Keep it out of git"])


def _written_words(name: str, found: settings_files.SettingsFile, wishes: Wishes) -> str:
    if found.changed:
        return f"written; others have changed the file since it was first connected, so what was there before is only in {found.kept}"
    scoped = " --scope project" if wishes.scope == "project" else ""
    return f"written; `ostinato connect {name} --undo{scoped}` takes it back"
