"""`ostinato-connect`: sets an unmodified coding agent up to use the gateway. It shows what it would write, asks, and can undo it.

The gateway as an agent sees it: the models that it lists, and one small call in a dialect.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the built-in one only since Python 3.11
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

from ostinato_client.connect import settings_files
from ostinato_client.connect.agent_settings import (
    AGENTS,
    DEFAULT_URL,
    KEY_VARIABLE,
    URL_VARIABLE,
    Agent,
    Aim,
    Dialect,
    Json,
    Scope,
    Surroundings,
)
from ostinato_client.connect.errors import BadConfig, ConnectError, NotFound, Unauthorized, Unavailable
from ostinato_client.connect.settings_files import diff
from ostinato_client.connect.terminal import Terminal, hidden, masked, plain

# ---------------------------------------------------------------- the gateway


_MOST_BYTES = 1024 * 1024
_MOST_CHARS = 300  # of an error's text
_MOST_MASKED = 1_000  # characters of a server's text that are searched for secrets
_MOST_DIGITS = 18  # of a version: int() refuses thousands of them
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


@dataclass(frozen=True)
class Captured:
    """What the gateway reports of a captured call. A field that is not reported is None, such as `version` if an outside model answered."""

    turn: str
    request: str
    arm: str
    version: int | None
    root: str
    prompt_tokens: int | None
    answer_tokens: int | None


def first_model(url: str, key: str | None) -> str:
    """The model that the gateway lists first. Raises Unavailable, Unauthorized, BadConfig."""
    body, _ = _ask(url, key, "/v1/models", None, _LOOK_S)
    listed: object = body.get("data")
    names = (
        [each.get("id") for each in cast(list[Any], listed) if isinstance(each, dict)]
        if isinstance(listed, list)
        else []
    )
    if not names or not isinstance(names[0], str):
        raise BadConfig(f"{url}/v1/models lists no model; is it a gateway's address? Name the model with --model")
    return names[0]


def call(url: str, key: str | None, model: str, dialect: Dialect) -> Captured:
    """Make one small call. Raises Unavailable, Unauthorized, and BadConfig if it is refused, or answered but not captured."""
    path, question = _CALLS[dialect]
    body, headers = _ask(url, key, path, {"model": model, **question}, _CALL_S)
    turn = headers.get("x-ostinato-turn", "")
    if not turn:
        raise BadConfig(f"{url} answered, but captured no turn (no X-Ostinato-Turn); give --url an Ostinato gateway")
    usage = cast(Json, found) if isinstance(found := body.get("usage"), dict) else {}
    version = headers.get("x-ostinato-policy", "")
    return Captured(
        turn=plain(turn),
        request=plain(headers.get("request-id", "")),
        arm=plain(headers.get("x-ostinato-arm", "")),
        version=int(version) if version.isdecimal() and len(version) <= _MOST_DIGITS else None,
        root=plain(headers.get("x-ostinato-weights", "")),
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        answer_tokens=_count(usage, "completion_tokens", "output_tokens"),
    )


def _count(usage: Json, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := usage.get(name), int)), None)


def _ask(
    url: str, key: str | None, path: str, body: Json | None, timeout_s: float
) -> tuple[Json, http.client.HTTPMessage]:
    """Make a request; returns the JSON object and the response's headers. The key goes to this address only: no redirect is followed."""
    try:
        status, answered, raw = _request(f"{url}{path}", key, body, timeout_s)
    except socket.timeout as error:
        raise Unavailable(f"{url} gave no answer within {timeout_s:g} s; look at `ostinato status`") from error
    except (http.client.HTTPException, OSError, ValueError) as error:
        why = f"{type(error).__name__}: {_shown(str(error), key)}"
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


def _request(
    url: str, key: str | None, body: Json | None, timeout_s: float
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body within `timeout_s` in all. Raises HTTPException, OSError (socket.timeout if it is late), ValueError."""
    parts = urlsplit(url)
    headers = {"anthropic-version": "2023-06-01"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    where = quote(parts.path, safe="/%:@!$&'()*+,;=~")
    exchange = _Exchange(connection, "GET" if data is None else "POST", where, data, headers)
    # a socket's timeout starts again with each byte, so a server that sends slowly is left from outside
    threading.Thread(target=exchange.run, name="ostinato-connect-request", daemon=True).start()
    try:
        return exchange.answer.result(timeout_s)
    except Late as error:
        raise socket.timeout from error
    finally:
        exchange.stop()


class _Exchange:
    """One request and its response, on a thread that can be left."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        where: str,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        self.answer: Future[tuple[int, http.client.HTTPMessage, bytes]] = Future()
        self._connection, self._asked = connection, (method, where, data, headers)
        self._socket: socket.socket | None = None
        self._stopped = False

    def run(self) -> None:
        """Set `answer`, to a result or an exception."""
        try:
            self.answer.set_result(self._read())
        except Exception as error:  # noqa: BLE001 (the thread that waits raises it)
            self.answer.set_exception(error)

    def stop(self) -> None:
        """Shut the socket, so that a thread that still reads ends."""
        self._stopped = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = self._connection
        try:
            connection.connect()
            self._socket = connection.sock  # the connection forgets it if the server will close
            if self._stopped:
                raise socket.timeout
            method, where, data, headers = self._asked
            connection.request(method, where, body=data, headers=headers)
            with connection.getresponse() as response:
                raw = b""
                while piece := response.read1(65_536):
                    raw += piece
                    if len(raw) > _MOST_BYTES:
                        raise ValueError(f"more than {_MOST_BYTES} bytes")
                if response.length:
                    raise http.client.IncompleteRead(raw)
                return response.status, response.headers, raw
        finally:
            connection.close()


def _refusal(where: str, status: int, raw: bytes, key: str | None) -> BadConfig | Unauthorized | Unavailable:
    try:
        said = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = raw.decode(errors="replace")
    words = _shown(said, key)
    kind = Unauthorized if status == 401 else Unavailable if status >= 500 or status == 429 else BadConfig
    remedy = _REMEDIES.get(status, "the gateway's output says why" if status >= 500 else "look at --url")
    return kind(f"{where} answered {status}: {words}; {remedy}")


def _shown(said: str, key: str | None) -> str:
    """The start of a server's text on one line, with secrets masked. However long the text is, little of it is searched."""
    text = " ".join(said.split())
    if key:
        text = text.replace(key, masked(key))
    if len(text) > _MOST_MASKED:
        text = text[:_MOST_MASKED].rpartition(" ")[0]  # whole words: half a secret does not look like one
    return plain(hidden(text, key))[:_MOST_CHARS] or "…"


# ---------------------------------------------------------------- the command


_KEY = re.compile(r"[A-Za-z0-9._~+/=:@-]{1,512}")
_MODEL = re.compile(r"[\w.:/@+-]{1,200}")
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Options:
    """The options given on the command line.

    Attributes:
        url: the gateway's URL; None: the one that the surroundings name.
        key: the gateway's key; None: the environment's, or none.
        model: the model's name; None: the first that the gateway lists.
        session: the session that all calls belong to.
        scope: settings for the user, or for the current directory.
        telemetry: have the agent send its log events to the gateway, too.
        yes: do not ask.
        program: the command as it was typed, for the line that says how to undo it.
    """

    url: str | None = None
    key: str | None = None
    model: str | None = None
    session: str | None = None
    scope: Scope = "user"
    telemetry: bool = False
    yes: bool = False
    program: str = "ostinato-connect"


def surroundings() -> Surroundings:
    """The surroundings of this process. Raises BadConfig on Windows, and if the current directory is gone."""
    if sys.platform == "win32":
        raise BadConfig("files that only their owner can read cannot be written on Windows; run this in WSL")
    try:
        return Surroundings(env=dict(os.environ), directory=Path.cwd(), mac=sys.platform == "darwin")
    except FileNotFoundError as error:
        raise BadConfig("the current directory is gone; change to another") from error


def connect(name: str, options: Options, at: Surroundings, terminal: Terminal) -> None:
    """Write an agent's settings, once a person has agreed.

    Raises:
        BadConfig: an option or a settings file cannot be used.
        Unavailable, Unauthorized: the gateway does not say which model it has.
        Conflict: the file was changed while a person was asked.
        StorageFull: the file cannot be written.
    """
    agent = _agent(name)
    if options.telemetry and not agent.telemetry:
        able = " and ".join(each for each, known in AGENTS.items() if known.telemetry)
        raise BadConfig(f"--telemetry: {name} cannot send it so; {able} can. Leave it out")
    found = _look(name, agent, options.scope, at) if agent.places else None
    aim = _aim(options, at)
    if found is None:
        terminal.say(agent.hints(aim, ""))
        return
    try:
        text = agent.settings(found.base, aim)
    except BadConfig as error:
        raise BadConfig(f"{found.path}: {error}") from error
    _propose(found, text, aim, terminal)
    if _is_written(found, text, aim):
        terminal.say(["nothing to change: it is connected already"])
    elif not terminal.agreed("write this?", yes=options.yes):
        return
    else:
        settings_files.write(found, text, secret=_secret(text, aim))
        terminal.say([_written_words(name, found, options)])
    exports = agent.exports(aim).items()
    terminal.say([f"export {variable}={masked(value)}  # in full, where it starts" for variable, value in exports])
    terminal.say(agent.hints(aim, text))


def undo(name: str, options: Options, at: Surroundings, terminal: Terminal) -> None:
    """Put back what was there before `connect`. Raises NotFound, Conflict if the file was changed since, BadConfig."""
    agent = _agent(name)
    if not agent.places:
        raise NotFound(f"nothing to undo: no file is written for {name}; switch its settings off by hand")
    found = _look(name, agent, options.scope, at)
    backup = settings_files.restored(found)
    terminal.show(diff(str(found.path), found.text, backup.before, _key(options, at)))
    if terminal.agreed("put this back?", yes=options.yes):
        settings_files.undo(found)
        terminal.say([f"{found.path} is as it was before"])


def check_capture(dialect: Dialect, options: Options, at: Surroundings, terminal: Terminal) -> None:
    """Make one small call and print how it was captured. Raises Unavailable, Unauthorized, BadConfig."""
    aim = _aim(options, at)
    seen = call(aim.url, aim.key, aim.model, dialect)
    made = f"v{seen.version} {seen.root[:16]}".rstrip() if seen.version is not None else "none of this run's"
    tokens = " and ".join(
        f"{count} of the {which}"
        for which, count in (("prompt", seen.prompt_tokens), ("answer", seen.answer_tokens))
        if count is not None
    )
    terminal.say(
        [
            f"{aim.url} speaks {dialect}, model {aim.model}",
            f"turn     {seen.turn}" + (f"  (request {seen.request})" if seen.request else ""),
            f"weights  {made}" + (f"  (arm {seen.arm})" if seen.arm else ""),
            f"tokens   {tokens or 'not told'}",
        ]
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


def _aim(options: Options, at: Surroundings) -> Aim:
    key = _key(options, at)
    url = _url(options, at)
    if options.session is not None:
        if not _SESSION.fullmatch(options.session):
            raise BadConfig(
                f"--session {options.session!r}: 1-128 letters, digits, '.', '_' and '-', a letter or digit first"
            )
        url = f"{url}/s/{options.session}"
    model = options.model or first_model(url, key)
    if not _MODEL.fullmatch(model):
        raise BadConfig(f"the model's name {model[:200]!r} cannot be put into settings; name another with --model")
    return Aim(url=url, key=key, model=model, telemetry=options.telemetry)


def _url(options: Options, at: Surroundings) -> str:
    if options.url is not None:
        return _address(options.url, "--url")
    if at.find_gateway is not None:
        return at.find_gateway()
    return _address(at.env.get(URL_VARIABLE) or DEFAULT_URL, URL_VARIABLE)


def _key(options: Options, at: Surroundings) -> str | None:
    key = at.env.get(KEY_VARIABLE) if options.key is None else options.key
    if key and not _KEY.fullmatch(key):
        raise BadConfig(
            f"the key of --key or {KEY_VARIABLE} has characters that no key has; look for blanks and quotes"
        )
    return key or None


def _address(text: str, name: str) -> str:
    """The gateway's URL without ``/v1``. Raises BadConfig, with the name of the option or variable that it comes from."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, fine = None, False
    if parts is None or not fine or not text.isprintable() or set(text) & set(" \"'\\$`"):
        raise BadConfig(f"{name}: write it as http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadConfig(f"{name} takes no user, question or fragment; give the key as {KEY_VARIABLE} or with --key")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _secret(text: str, aim: Aim) -> bool:
    return aim.key is not None and aim.key in text


def _is_written(found: settings_files.SettingsFile, text: str, aim: Aim) -> bool:
    """True if the file is already as it should be, permissions included."""
    closed = found.mode is not None and not found.mode & 0o077
    return found.text == text and (closed or not _secret(text, aim))


def _propose(found: settings_files.SettingsFile, text: str, aim: Aim, terminal: Terminal) -> None:
    if found.real != found.path:
        terminal.say([f"{found.path} leads to {found.real}"])
    terminal.show(diff(str(found.path), found.text, text, aim.key))
    if _secret(text, aim):
        terminal.say([f"{found.path} is readable by its owner only (0600): it holds your key. Keep it out of git"])


def _written_words(name: str, found: settings_files.SettingsFile, options: Options) -> str:
    if found.changed:
        return f"written; others have changed the file since it was first connected, so what was there before is only in {found.kept}"
    scoped = " --scope project" if options.scope == "project" else ""
    return f"written; `{options.program} {name} --undo{scoped}` takes it back"


# ---------------------------------------------------------------- the command line


_HELP = """\
Connect an unmodified coding agent to an Ostinato gateway: show the change to the agent's settings file, ask, and write it.
A backup beside the file holds what was there before; --undo restores it.
"""
_KEY_HELP = f"the gateway's key. Prefer the variable {KEY_VARIABLE}, which other users of this machine cannot see"
_SCOPE_HELP = (
    "user: your settings, for every directory (default). project: the current directory's, if the agent supports it"
)
_EXAMPLES = """\
examples:
  {program} claude-code --url https://gateway.example.org
  {program} claude-code --undo
  {program} codex --session fix-login
  {program} --test --dialect messages
"""


def run(
    agent: str | None,
    options: Options,
    at: Surroundings,
    terminal: Terminal,
    *,
    test: bool = False,
    undone: bool = False,
    dialect: Dialect | None = None,
) -> None:
    """Connect an agent, undo it (`undone`), or make one call (`test`). Raises what `connect`, `undo` and `check_capture` raise."""
    if test and undone:
        raise BadConfig("--test and --undo: give one of them")
    if dialect is not None and not test:
        raise BadConfig("--dialect is of --test; an agent's own is known. Leave it out, or add --test")
    if test:
        check_capture(dialect or (_agent(agent).dialect if agent else "chat"), options, at, terminal)
    elif agent is None:
        raise BadConfig(f"name an agent ({', '.join(AGENTS)}), or give --test")
    elif undone:
        undo(agent, options, at, terminal)
    else:
        connect(agent, options, at, terminal)


def main(words: Sequence[str] | None = None, program: str = "ostinato-connect") -> int:
    """Run the command line; returns the exit code: 0, 2 for an error, 130 after Ctrl-C."""
    given = _parser(program).parse_args(words)
    options = Options(
        url=given.url,
        key=given.key,
        model=given.model,
        session=given.session,
        scope=given.scope,
        telemetry=given.telemetry,
        yes=given.yes,
        program=program,
    )
    try:
        at = surroundings()
        run(given.agent, options, at, Terminal(sys.stdout), test=given.test, undone=given.undo, dialect=given.dialect)
    except ConnectError as error:
        sys.stderr.write(f"{program}: {plain(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=_HELP,
        epilog=_EXAMPLES.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "agent", nargs="?", choices=list(AGENTS), metavar="AGENT", help=f"whose settings to change: {', '.join(AGENTS)}"
    )
    add("--url", help=f"the gateway's address (default: {URL_VARIABLE}, else {DEFAULT_URL})")
    add("--key", help=_KEY_HELP)
    add("--model", help="the model's name (default: the first that the gateway lists)")
    add("--session", metavar="NAME", help="name of a session that all the agent's calls are to belong to")
    add("--scope", choices=["user", "project"], default="user", help=_SCOPE_HELP)
    add("--telemetry", action="store_true", help="have the agent send its log events, too (claude-code, codex)")
    add("--undo", action="store_true", help="restore the settings exactly as they were before")
    add(
        "--test",
        action="store_true",
        help="write nothing; make one small call and show what the gateway captured of it",
    )
    add("--dialect", choices=list(_CALLS), help="API dialect of --test (default: the agent's own, or chat)")
    add("--yes", action="store_true", help="do not ask for confirmation")
    return parser
