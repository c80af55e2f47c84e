"""How each coding agent is set up to use a gateway, as data: where its settings file is, what goes into it, how the agent is started.

The formats of coding agents' settings, edited as text: JSON is merged, any other format gets a marked block of our lines.

Nothing here reads or writes a file. An edit that would harm the existing settings is refused with BadConfig.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ostinato_client.connect.errors import BadConfig

# ---------------------------------------------------------------- forms of settings files


Json = dict[str, Any]

NAME = "Ostinato"
"""The name of our entry in a list of providers."""

_BLOCK = re.compile(
    r"^# >>> ostinato connect: (\w+) >>>\r?\n.*?^# <<< ostinato connect: \1 <<<(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"# (>>>|<<<) ostinato connect: \w+ \1")
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)
_YAML_LINE = re.compile(r"(---|[ \t#-].*|(['\"]?)([\w.-]+)\2[ \t]*:([ \t].*)?|)")
_ENV_LINE = re.compile(
    r"""\s*(\#.*|(export\s+)?[A-Za-z_][\w.-]*\s*(=\s*('[^']*'\s*(\#.*)?|"(\\.|[^"\\])*"\s*(\#.*)?|[^'"].*|))?)?"""
)


def merged_json(text: str | None, settings: Json) -> str:
    """A JSON file with these settings merged in; all others are kept. In a list, our own entry comes first, once.

    Args:
        text: the file's text; None: there is no file.
        settings: the settings to merge in.

    Raises:
        BadConfig: it is not a plain JSON object, names a key twice, or holds something else where an object or list is needed.
    """
    return edited_json(text, lambda there: _merged(there, settings, ""))


def edited_json(text: str | None, change: Callable[[Json], Json]) -> str:
    """A JSON file after `change`, with its layout kept where possible. Raises BadConfig as `merged_json` does."""
    mark, text = without_mark(text or "")
    there = _object(text) if text.strip() else {}
    new = change(there)
    if new == there and text.strip():
        return mark + text
    found = _INDENT.search(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    written = json.dumps(new, indent=found[1] if found else 2, ensure_ascii=False)
    return mark + f"{written}\n".replace("\n", newline)


def lines_of(text: str) -> list[str]:
    r"""The lines of a text, which end at \n or \r\n alone; the last may lack its end.

    Example: ``lines_of("a\u2028b\r\nc\n") == ["a\u2028b", "c"]``
    """
    lines = [line[:-1] if line.endswith("\r") else line for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def without_mark(text: str) -> tuple[str, str]:
    """A text's byte order mark, with which some editors begin a file, and the rest."""
    return ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)


def _object(text: str) -> Json:
    try:
        value: object = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"it is no plain JSON ({error}); mend it, and take out comments") from error
    if not isinstance(value, dict):
        raise BadConfig("it holds no JSON object; mend it")
    return cast(Json, value)


def _once(pairs: list[tuple[str, Any]]) -> Json:
    found: Json = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _merged(there: Json, settings: Mapping[str, Any], where: str) -> Json:
    new = dict(there)
    for name, value in settings.items():
        old, place = there.get(name), f"{where}{name}"
        if isinstance(value, dict):
            if name in there and not isinstance(old, dict):
                raise BadConfig(f"{place} is no JSON object; mend it")
            new[name] = _merged(cast(Json, old or {}), cast(Json, value), f"{place}.")
        elif isinstance(value, list):
            if name in there and not isinstance(old, list):
                raise BadConfig(f"{place} is no JSON list; mend it")
            new[name] = [*cast(list[Any], value), *(each for each in cast(list[Any], old or []) if not _is_ours(each))]
        else:
            new[name] = value
    return new


def _is_ours(entry: object) -> bool:
    return isinstance(entry, dict) and cast(Json, entry).get("name") == NAME


def without_blocks(text: str) -> str:
    """A text without our marked blocks. Raises BadConfig for a marker without its counterpart."""
    left = _BLOCK.sub("", text)
    for line in lines_of(left):
        if _MARKER.fullmatch(line):
            raise BadConfig(f"it has the line {line!r} without its other end; take it out")
    return left


def with_block(text: str, name: str, lines: Sequence[str], *, first: bool = False) -> str:
    r"""A text with these lines between markers of this name, replacing the lines that were there. All else stays, byte for byte.

    Args:
        text: a file's text.
        name: one word that tells this block from others of ours.
        lines: the block's lines; empty: the block is removed.
        first: a new block is put before the text, not after it.

    Example: ``with_block("a = 1\n", "more", ["b = 2"])`` has ``b = 2`` between its markers at the end.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    marked = (f"# >>> ostinato connect: {name} >>>", *lines, f"# <<< ostinato connect: {name} <<<") if lines else ()
    block = "".join(f"{line}{newline}" for line in marked)
    for found in _BLOCK.finditer(text):
        if found[1] == name:
            return text[: found.start()] + block + text[found.end() :]
    if first:
        mark, rest = without_mark(text)
        return mark + block + rest
    return text + (newline if block and text and not text.endswith("\n") else "") + block


def toml_of(text: str) -> Json:
    """A TOML text's values. Raises BadConfig, also before Python 3.11, whose standard library reads no TOML."""
    try:
        import tomllib
    except ImportError as error:
        raise BadConfig("it is TOML, which Python reads from 3.11 on; run this with a newer Python") from error
    try:
        return tomllib.loads(without_mark(text)[1])
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"it is no TOML ({error}); mend it") from error


def yaml_keys(text: str) -> dict[str, int]:
    """The top-level keys of a YAML mapping in block style, with their line numbers from 1. Raises BadConfig for any other YAML."""
    keys: dict[str, int] = {}
    for number, line in enumerate(lines_of(without_mark(text)[1]), 1):
        found = _YAML_LINE.fullmatch(line)
        if found is None or (line == "---" and keys):
            raise BadConfig(f"line {number} is not of the form 'name: value'; mend it")
        if found[3] is not None:
            keys[found[3]] = number
    return keys


def check_env(text: str) -> None:
    """Raise BadConfig unless every line is ``NAME=value``, a comment or empty: an open quote would swallow our lines."""
    for number, line in enumerate(lines_of(without_mark(text)[1]), 1):
        if _ENV_LINE.fullmatch(line) is None:
            raise BadConfig(f"line {number} is not of the form NAME=value on one line; mend it")


def quoted(text: str) -> str:
    """A JSON string, which TOML and YAML read too."""
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------- agents


Dialect = Literal["chat", "messages", "responses"]
Scope = Literal["user", "project"]

PLACEHOLDER = "ostinato"
"""The key for agents that insist on a key, if the gateway asks for none."""
KEY_VARIABLE = "OSTINATO_API_KEY"
URL_VARIABLE = "OSTINATO_URL"
DEFAULT_URL = "http://127.0.0.1:8321"
"""The gateway if neither an option nor `URL_VARIABLE` names one: that of `ostinato up` on this machine."""


@dataclass(frozen=True)
class Aim:
    """The gateway and model for an agent. `url` is the gateway's, without ``/v1``, with ``/s/SESSION`` if all calls belong to one session.

    Example: ``Aim(url="http://127.0.0.1:8321/s/fix-login", key=None, model="smollm2")``
    """

    url: str
    key: str | None
    model: str
    telemetry: bool = False

    @property
    def v1(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def some_key(self) -> str:
        """The key, or the placeholder."""
        return self.key or PLACEHOLDER


@dataclass(frozen=True)
class Surroundings:
    """Where the command runs.

    Attributes:
        env: the environment.
        directory: the current directory.
        mac: True on macOS.
        find_gateway: returns the URL of the gateway if no option names it; None: it is that of `OSTINATO_URL`, or `DEFAULT_URL`.
    """

    env: Mapping[str, str]
    directory: Path
    mac: bool = False
    find_gateway: Callable[[], str] | None = None

    @property
    def home(self) -> Path:
        """The user's home directory. Raises BadConfig if it is not known."""
        home = Path(self.env.get("HOME", ""))
        if not home.is_absolute():
            raise BadConfig("HOME is not set to a directory, so nobody knows where settings lie; set it")
        return home

    def named(self, variable: str, default: Callable[[], Path]) -> Path:
        """The directory that an environment variable names, or the default. Raises BadConfig for a relative path."""
        value = self.env.get(variable)
        if not value:
            return default()
        if not Path(value).is_absolute():
            raise BadConfig(f"{variable} is {value!r}; set it to an absolute path, or unset it")
        return Path(value)

    def configs(self, name: str, *, apple: bool = False) -> Path:
        """A program's directory below ``~/.config``, or in macOS's own place if the program follows macOS there (`apple`)."""
        if apple and self.mac:
            return self.home / "Library" / "Application Support" / name
        return self.named("XDG_CONFIG_HOME", lambda: self.home / ".config") / name


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Attributes:
        dialect: the API dialect that it speaks.
        places: its settings file for each scope that it knows; empty if there is no file that could be written.
        settings: given the file's text, or None, returns the text with the needed settings in it; raises BadConfig.
        exports: variables that only its environment can hold.
        hints: what a person has to know, given the file's new text.
        telemetry: True if it can send its log events to the gateway.
    """

    dialect: Dialect
    places: Mapping[Scope, Callable[[Surroundings], Path]]
    settings: Callable[[str | None, Aim], str]
    hints: Callable[[Aim, str], Sequence[str]]
    exports: Callable[[Aim], Mapping[str, str]] = field(default=lambda _: {})
    telemetry: bool = False


def _claude_code(text: str | None, aim: Aim) -> str:
    env = {
        "ANTHROPIC_BASE_URL": aim.url,
        "ANTHROPIC_AUTH_TOKEN": aim.some_key,
        "ANTHROPIC_MODEL": aim.model,
        # its aliases, which sub-agents and side calls use: the gateway has no model of those names
        "ANTHROPIC_DEFAULT_OPUS_MODEL": aim.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": aim.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": aim.model,
    }
    if aim.telemetry:
        env |= {
            "CLAUDE_CODE_ENABLE_TELEMETRY": "1",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/json",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"{aim.v1}/logs",
        }
        if aim.key:
            env["OTEL_EXPORTER_OTLP_LOGS_HEADERS"] = f"x-api-key={aim.key}"
    return merged_json(text, {"env": env})


def _codex(text: str | None, aim: Aim) -> str:
    own = without_blocks(text or "")
    there = toml_of(own)
    tail = [
        "[model_providers.ostinato]",
        f"name = {quoted(NAME)}",
        f"base_url = {quoted(aim.v1)}",
        'wire_api = "responses"',
        *([f'env_key = "{KEY_VARIABLE}"'] if aim.key else []),
    ]
    if aim.telemetry:
        if "otel" in there:
            raise BadConfig("it has a table [otel] of its own; take it out, or leave --telemetry out")
        headers = f", headers = {{ authorization = {quoted(f'Bearer {aim.key}')} }}" if aim.key else ""
        endpoint = quoted(f"{aim.v1}/logs")
        tail += ["[otel]", f'exporter = {{ otlp-http = {{ endpoint = {endpoint}, protocol = "json"{headers} }} }}']
    # TOML allows each key once, so a model that the user has chosen stays, and ours is chosen on the command line
    head = [] if there.keys() & {"model", "model_provider"} else _codex_choice(aim)
    new = with_block(with_block(text or "", "model", head, first=True), "provider", tail)
    try:
        toml_of(new)
    except BadConfig as error:
        raise BadConfig("it has a provider named ostinato of its own; take it out") from error
    return new


def _codex_choice(aim: Aim) -> list[str]:
    return [f"model = {quoted(aim.model)}", 'model_provider = "ostinato"']


def _codex_hints(aim: Aim, text: str) -> list[str]:
    if toml_of(text).get("model_provider") == "ostinato":
        return ["start it with: codex"]
    choice = f"""codex -c 'model_provider="ostinato"' -m {shlex.quote(aim.model)}"""
    return ["config.toml chooses a model of its own, which stays", f"start it with: {choice}"]


def _opencode(text: str | None, aim: Aim) -> str:
    provider: Json = {
        "npm": "@ai-sdk/openai-compatible",
        "name": NAME,
        "options": {"baseURL": aim.v1, "apiKey": aim.some_key},
        "models": {aim.model: {"name": aim.model}},
    }
    schema = {} if text and text.strip() else {"$schema": "https://opencode.ai/config.json"}
    return merged_json(text, {**schema, "provider": {"ostinato": provider}, "model": f"ostinato/{aim.model}"})


def _qwen_code(text: str | None, aim: Aim) -> str:
    provider = {"id": aim.model, "name": NAME, "baseUrl": aim.v1, "envKey": KEY_VARIABLE}
    settings: Json = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": aim.model},
        "modelProviders": {"openai": [provider]},
        "env": {KEY_VARIABLE: aim.some_key},
    }
    return merged_json(text, settings)


def _mini(text: str | None, aim: Aim) -> str:
    check_env(without_blocks(text or ""))
    values = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_MODEL_NAME": f"openai/{aim.model}",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_API_BASE": aim.v1,
        "OPENAI_BASE_URL": aim.v1,  # read first by the library with which mini calls models
        "OPENAI_API_KEY": aim.some_key,
    }
    # if two lines set the same variable, the later wins
    return with_block(text or "", "model", [f"{name}='{value}'" for name, value in values.items()])


def _aider(text: str | None, aim: Aim) -> str:
    values = {"model": f"openai/{aim.model}", "openai-api-base": aim.v1, "openai-api-key": aim.some_key}
    there = yaml_keys(without_blocks(text or ""))
    for name in values:
        if name in there:
            raise BadConfig(f"line {there[name]} sets {name} already; take that line out")
    return with_block(text or "", "model", [f"{name}: {quoted(value)}" for name, value in values.items()])


def _cursor_steps(aim: Aim, _: str) -> list[str]:
    key = "your key" if aim.key else repr(PLACEHOLDER)
    return [
        "Cursor keeps these settings where no file can be written; in Cursor:",
        "  1. Settings > Models > API Keys: switch 'OpenAI API Key' on, and put in " + key,
        f"  2. switch 'Override OpenAI Base URL' on, and put in {aim.v1}",
        f"  3. add the custom model {aim.model}, and choose it for the chat",
        "Cursor's own servers make the calls: the address must be one that the internet reaches, with https and a key.",
    ]


AGENTS: Mapping[str, Agent] = {
    "claude-code": Agent(
        dialect="messages",
        places={
            "user": lambda at: at.named("CLAUDE_CONFIG_DIR", lambda: at.home / ".claude") / "settings.json",
            "project": lambda at: at.directory / ".claude" / "settings.local.json",
        },
        settings=_claude_code,
        hints=lambda aim, text: ["start it with: claude"],
        telemetry=True,
    ),
    "codex": Agent(
        dialect="responses",
        places={"user": lambda at: at.named("CODEX_HOME", lambda: at.home / ".codex") / "config.toml"},
        settings=_codex,
        hints=_codex_hints,
        exports=lambda aim: {KEY_VARIABLE: aim.key} if aim.key else {},
        telemetry=True,
    ),
    "opencode": Agent(
        dialect="chat",
        places={
            "user": lambda at: at.configs("opencode") / "opencode.json",
            "project": lambda at: at.directory / "opencode.json",
        },
        settings=_opencode,
        hints=lambda aim, text: ["start it with: opencode"],
    ),
    "qwen-code": Agent(
        dialect="chat",
        places={
            "user": lambda at: at.home / ".qwen" / "settings.json",
            "project": lambda at: at.directory / ".qwen" / "settings.json",
        },
        settings=_qwen_code,
        hints=lambda aim, text: ["start it with: qwen"],
    ),
    "mini-swe-agent": Agent(
        dialect="chat",
        places={
            "user": lambda at: (
                at.named("MSWEA_GLOBAL_CONFIG_DIR", lambda: at.configs("mini-swe-agent", apple=True)) / ".env"
            )
        },
        settings=_mini,
        hints=lambda aim, text: ["start it with: mini"],
    ),
    "aider": Agent(
        dialect="chat",
        places={
            "user": lambda at: at.home / ".aider.conf.yml",
            "project": lambda at: at.directory / ".aider.conf.yml",
        },
        settings=_aider,
        hints=lambda aim, text: ["start it with: aider"],
    ),
    "cursor": Agent(dialect="chat", places={}, settings=lambda text, aim: text or "", hints=_cursor_steps),
}
