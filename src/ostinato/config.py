"""One frozen tree of the rooms' settings: a TOML file, then `--set a.b=c`, checked once; an unknown key is an error."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field, ValidationError

from ostinato.core.errors import BadConfig
from ostinato.engine.config import EngineConfig
from ostinato.evaluate.gate import GateConfig
from ostinato.evaluate.runner import RunnerConfig
from ostinato.model.config import ModelConfig
from ostinato.record.config import RecordConfig
from ostinato.release.controller import ReleaseConfig
from ostinato.reward.config import RewardConfig
from ostinato.serve.config import ServeConfig
from ostinato.train.config import TrainConfig
from ostinato.weights.follow.follower import FollowerConfig
from ostinato.weights.keep.gc import CollectConfig
from ostinato.weights.publish.publisher import PublisherConfig
from ostinato.weights.relay.store import RelayConfig
from ostinato.weights.store.bucket import BucketConfig
from ostinato.worlds.sandbox import SandboxConfig as SandboxConfig


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    """Where this run keeps its log, weights and checkpoints."""

    directory: Path = Field(
        default=Path("runs/default"), description="Holds the log, the weight store, checkpoints, keys and worker logs."
    )
    seed: int = Field(default=0, description="Seeds training, simulated users and evaluation draws.")


class ListenConfig(BaseModel, frozen=True, extra="forbid"):
    """Where the gateway listens."""

    host: str = Field(default="127.0.0.1", description="Address to bind; anything but loopback needs serve.api_keys.")
    port: int = Field(default=8321, ge=0, le=65535, description="TCP port; 0 lets the system choose (the demo does).")


class LearnConfig(BaseModel, frozen=True, extra="forbid"):
    """The pace of learning."""

    batch: int = Field(default=144, ge=1, description="Turns per optimizer step.")
    publish_every: int = Field(default=2, ge=1, description="Steps between two published candidates.")
    checkpoint_every: int = Field(
        default=5, ge=1, description="Steps between two checkpoints; the steps since are taken again after a crash."
    )
    max_lead: int = Field(
        default=6, ge=1, description="Steps the trainer may be ahead of what is live before it waits for the gate."
    )
    poll_s: float = Field(
        default=0.5, gt=0, description="Pause between looks at the log while too few turns are ready."
    )


class EvaluateConfig(BaseModel, frozen=True, extra="forbid"):
    """What a candidate must prove, and on what."""

    suite: str = Field(default="demo", description="A JSONL task file, or 'demo' for the copilot's held-out functions.")
    items: int = Field(default=0, ge=0, description="Use only the first so many items; 0: all.")
    grade_timeout_s: float = Field(default=4.0, gt=0, description="Wall seconds for one answer's hidden tests.")
    runner: RunnerConfig = Field(default_factory=RunnerConfig, description="How the suite is run.")
    gate: GateConfig = Field(default_factory=GateConfig, description="Margin, level and number of looks.")


class Config(BaseModel, frozen=True, extra="forbid"):
    """Everything that can be set."""

    run: RunConfig = Field(default_factory=RunConfig, description="Where this run lives.")
    listen: ListenConfig = Field(default_factory=ListenConfig, description="Where the gateway listens.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model.")
    serve: ServeConfig = Field(default_factory=ServeConfig, description="The gateway: limits, keys, arms.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The embedded engine: sizes.")
    record: RecordConfig = Field(default_factory=RecordConfig, description="The log: how long, how large, whose keys.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward function and credit.")
    learn: LearnConfig = Field(default_factory=LearnConfig, description="The pace of learning.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="One optimizer step.")
    weights: BucketConfig = Field(default_factory=BucketConfig, description="Where versions are kept.")
    publish: PublisherConfig = Field(default_factory=PublisherConfig, description="Snapshots and deltas.")
    follow: FollowerConfig = Field(default_factory=FollowerConfig, description="How engines follow refs.")
    collect: CollectConfig = Field(default_factory=CollectConfig, description="What garbage collection keeps.")
    relay: RelayConfig = Field(default_factory=RelayConfig, description="A relay, and the cache of a follower.")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="The gate's suite and statistics.")
    release: ReleaseConfig = Field(default_factory=ReleaseConfig, description="Canary, guard, rollback.")
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig, description="Limits of generated code.")


def nearest(name: str, valid: Sequence[str]) -> str:
    """', did you mean X?' or the list of what there is."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid here: {', '.join(sorted(valid))}"


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"train.lr=1e-5"`` -> (["train", "lr"], 1e-05). The value is TOML, or a bare string if it is not TOML."""
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise BadConfig(f"--set {text!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return path.strip().split("."), value


def put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set tree[a][b] = value, making tables on the way."""
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise BadConfig(f"--set {'.'.join(path)}: {key!r} is a value, not a section")
        tree = cast("dict[str, Any]", below)
    tree[path[-1]] = value


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    for key in path:
        field = model.model_fields.get(str(key))
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = kind
    return list(model.model_fields)


def explain(model: type[BaseModel], error: ValidationError, origin: str) -> BadConfig:
    """One line per mistake, each with the key and the way out."""
    lines: list[str] = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {'.'.join(path)!r}; {nearest(path[-1], _fields_at(model, path[:-1]))}")
        else:
            lines.append(f"{'.'.join(path)}: {item['msg']} (got {item['input']!r})")
    return BadConfig(f"{origin}: " + "; ".join(lines))


def read_tree(
    path: Path | None, overrides: Sequence[str], base: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """The raw tree and where it came from, before checking. Raises BadConfig on an unreadable file."""
    tree: dict[str, Any] = json.loads(json.dumps(base or {}))
    origin = "defaults"
    if path is not None:
        origin = str(path)
        try:
            text = path.read_text(encoding="utf-8")
            tree |= json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except FileNotFoundError:
            raise BadConfig(f"no configuration file at {path}; leave --config out to run on defaults") from None
        except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadConfig(f"{path}: not valid {path.suffix.lstrip('.') or 'TOML'}: {error}") from error
    for override in overrides:
        put(tree, *parse_override(override))
    return tree, origin


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the file, then the overrides; checked. Raises BadConfig that names every wrong key and the nearest valid one.

    Example: ``load(Path("ostinato.toml"), ["train.learning_rate=1e-5"])``
    """
    tree, origin = read_tree(path, overrides)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise explain(Config, error, origin) from None


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration as JSON, secrets included, readable by its owner only: what the workers are started with."""
    text = json.dumps(config.model_dump(mode="json") | {"serve": _with_secrets(config.serve)}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _with_secrets(serve: ServeConfig) -> dict[str, Any]:
    plain = serve.model_dump(mode="json")
    plain["api_keys"] = [key.get_secret_value() for key in serve.api_keys]
    plain["user_keys"] = [key.get_secret_value() for key in serve.user_keys]
    plain["admin_key"] = serve.admin_key.get_secret_value() if serve.admin_key else None
    return plain
