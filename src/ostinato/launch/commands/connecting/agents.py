"""How each coding agent is set up to use a gateway, as data: where its settings file is, what goes into it, how the agent is started."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ostinato.core.errors import BadConfig
from ostinato.launch.commands.connecting.forms import (
    NAME,
    Json,
    check_env,
    merged_json,
    quoted,
    toml_of,
    with_block,
    without_blocks,
    yaml_keys,
)

Dialect = Literal["chat", "messages", "responses"]
Scope = Literal["user", "project"]

PLACEHOLDER = "ostinato"
"""The key for agents that insist on a key, if the gateway asks for none."""
KEY_VARIABLE = "OSTINATO_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where the command runs: its environment, the current directory, and whether this is macOS."""

    env: Mapping[str, str]
    directory: Path
    mac: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
