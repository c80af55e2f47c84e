"""The configuration: one frozen tree of all rooms' settings, from a TOML file and `--set a.b=c`. An unknown key is an error."""

from __future__ import annotations

import contextlib
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from ostinato.adapt.config import AdaptConfig
from ostinato.compute.config import ComputeConfig
from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.files import write_atomic
from ostinato.engine.config import EngineConfig
from ostinato.evaluate.config import BarConfig, GateConfig, RunnerConfig
from ostinato.model.config import ModelConfig
from ostinato.placing_config import HousekeepingConfig, RayConfig, SuperviseConfig
from ostinato.record.config import RecordConfig
from ostinato.release.config import ReleaseConfig
from ostinato.reward.config import RewardConfig
from ostinato.serve.config import PrivacyConfig, ServeConfig
from ostinato.train.config import TrainConfig
from ostinato.weights.config import BucketConfig, CollectConfig, FollowerConfig, PublisherConfig, RelayConfig
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.sandbox import SandboxConfig

M = TypeVar("M", bound=BaseModel)


class RunConfig(BaseModel, frozen=True, extra="forbid"):
    """Where this run keeps its log, weights and checkpoints."""

    directory: Path = Field(
        default=Path("runs/default"),
        description="Directory of the run's log, weight store, checkpoints, keys and worker logs.",
    )
    tenant: str = Field(
        default="",
        description="The tenant whose branch this run trains. The branch's run is in DIRECTORY/branches/TENANT of the run that serves "
        "it. `ostinato up` sets this for the workers of `learn.tenants`. Empty: the run that serves.",
    )


AUTO_TURNS = 144
"""Minimum of people's turns in a step with `learn.batch = "auto"`."""


class ListenConfig(BaseModel, frozen=True, extra="forbid"):
    """Where the gateway listens."""

    host: str = Field(default="127.0.0.1", description="Address to bind. Anything but loopback needs serve.api_keys.")
    port: int = Field(default=8321, ge=0, le=65535, description="TCP port. 0 lets the system choose, as the demo does.")


class LearnConfig(BaseModel, frozen=True, extra="forbid"):
    """Which turns are learned from, and the pace of learning."""

    source: Literal["people", "worlds", "both"] = Field(
        default="people",
        description="Which turns are learned from: people's, those of rollouts in simulated worlds (see `worlds`), or "
        "both in one step. Other turns get a reward and are held back.",
    )
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="People's turns per optimizer step. A step has fewer only where no more fit into `reward.batch_tokens`. 'auto': all "
        "turns that are ready and fit, at least 144. A step then waits until it has at least its even share of the turns whose rewards "
        "are not known yet, since each step makes those staler. Its learning rate grows with the square root of its turns, but at most to "
        "twice the rate.",
    )
    tenants: tuple[str, ...] = Field(
        default=(),
        description="Tenants of `serve.branches` whose branch is trained. Each has its own trainer, gate and guard. Its trainer starts "
        "from the version that is live at that time and learns from this tenant's people alone. Each tenant costs three processes, the "
        "memory of one more trainer, and that of up to three more versions in the gateway.",
    )
    worlds_weight: float | None = Field(
        default=0.4,
        gt=0,
        description="With source = 'both': root mean square (RMS) of the worlds' advantages in a step, relative to that of people's. 0.4 "
        "is what grades of 0 or 1 have where a fifth or four fifths are solved. null: the RMS that the grades have.",
    )
    corrections: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Weight per token with which a corrected answer is imitated (`correction` in feedback: the whole answer as it should "
        "have been). It is relative to the answer's credit, in which a token has an advantage of about 1. 0: corrections are not "
        "imitated, because others could then be answered, word for word, with what one user wrote. Where that does no harm, begin with "
        "0.1: text that the model did not produce itself has large gradients.",
    )
    publish_every: int = Field(default=2, ge=1, description="Optimizer steps between two published candidates.")
    checkpoint_every: int = Field(
        default=5,
        ge=1,
        description="Optimizer steps between two checkpoints. After a crash, the steps since the last checkpoint are repeated.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="How many of the newest checkpoints are kept.")
    checkpoint_ladder: int = Field(
        default=0,
        ge=0,
        le=20,
        description="Octaves of older checkpoints that are kept besides the newest, about two per octave. n octaves reach back 2^n times "
        "`checkpoint_every` steps, so that `ostinato forget --replay` repeats at most twice the steps since a person's first. Each "
        "checkpoint takes 12 bytes per parameter (1.6 GB at 135M). 0: none are kept, and a replay of older steps begins at the start of "
        "training.",
    )
    share_checkpoints: bool = Field(
        default=True,
        description="With record.url and weights.url: also copy checkpoints to weights.url, in the background, so that a trainer on "
        "another host can continue from them. Each takes 12 bytes per parameter.",
    )
    max_lead: int = Field(
        default=6,
        ge=1,
        description="Optimizer steps that the trainer may be ahead of the live version, never more than `reward.max_staleness`. At this "
        "lead it offers a candidate and waits for the gate or `ostinato ship`. With source = 'worlds' there is no limit.",
    )
    poll_s: float = Field(
        default=0.5, gt=0, description="Seconds between two checks of the log while too few turns are ready."
    )

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        """Raise ValueError for a tenant that is named twice."""
        if twice := sorted({tenant for tenant in given if given.count(tenant) > 1}):
            raise ValueError(f"{twice[0]!r} is named twice; a tenant has one branch: name it once")
        return given

    @field_validator("batch", mode="before")
    @classmethod
    def _check_batch(cls, given: Any) -> Any:
        """Raise one ValueError; pydantic would report one for each type of the union."""
        if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise ValueError("set 'auto' or a number of turns, 1 or more")
        return given

    @property
    def least_turns(self) -> int:
        """Minimum of people's turns in a step, unless more of them would exceed `reward.batch_tokens`."""
        return AUTO_TURNS if self.batch == "auto" else self.batch


class EvaluateConfig(BaseModel, frozen=True, extra="forbid"):
    """What a candidate must prove, and on what."""

    suite: str = Field(
        default="",
        description="A JSONL task file, of which items and held-out tasks count, or one of the demo's suites: 'demo' (the copilot's "
        "functions) or 'demo-tab' (Tab's lines). Empty: nothing is measured, so no candidate ships by itself; `ostinato ship` ships one "
        "by hand.",
    )
    further_suites: tuple[str, ...] = Field(
        default=(), description="More task files. The gate's margins apply to each of them."
    )
    tenant_suites: dict[str, tuple[str, ...]] = Field(
        default_factory=dict[str, tuple[str, ...]],
        description="Task files of each tenant of `learn.tenants`, by tenant. The gate measures the tenant's branch on these first, and "
        "then on the suites above.",
    )
    tasksets: tuple[str, ...] = Field(
        default=(),
        description="More task files, such as those of simulated worlds. They are treated like further_suites.",
    )
    bars: tuple[BarConfig, ...] = Field(
        default=(), description="Absolute quality bars that every candidate must clear, as tables [[evaluate.bars]]."
    )
    items: int = Field(
        default=0, ge=0, description="Use only the first N items, or held-out tasks, of each suite. 0: all."
    )
    gateway: str = Field(
        default="",
        description="URL (http://host:port) of the gateway through which candidates are measured, if the release worker's host has none. "
        "serve.admin_key must then be the same on both hosts. Empty: this host's gateway.",
    )
    grade_timeout_s: float = Field(
        default=4.0, gt=0, description="Longest run of one answer's hidden tests, in seconds of wall time."
    )
    opinions: bool = Field(
        default=True,
        description="Probe each candidate that passes the gate for sycophancy: does it side with a user's stated opinion more than live, "
        "the best release or the anchor does? For each version, 320 short prompts are scored once. The alarm is `sycophancy`.",
    )
    runner: RunnerConfig = Field(default_factory=RunnerConfig, description="How the suite is run.")
    gate: GateConfig = Field(default_factory=GateConfig, description="Margin, significance level and number of looks.")


class Config(BaseModel, frozen=True, extra="forbid"):
    """Everything that can be set."""

    run: RunConfig = Field(default_factory=RunConfig, description="Where this run lives.")
    listen: ListenConfig = Field(default_factory=ListenConfig, description="Where the gateway listens.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model to serve and train.")
    serve: ServeConfig = Field(default_factory=ServeConfig, description="The gateway: limits, keys, arms.")
    privacy: PrivacyConfig = Field(
        default_factory=PrivacyConfig, description="What may be done with people's turns and words."
    )
    engine: EngineConfig = Field(
        default_factory=EngineConfig, description="Which engine generates the tokens, and its sizes."
    )
    record: RecordConfig = Field(default_factory=RecordConfig, description="The log: retention, size, encryption keys.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward function and credit.")
    learn: LearnConfig = Field(default_factory=LearnConfig, description="The pace of learning.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="One optimizer step.")
    weights: BucketConfig = Field(default_factory=BucketConfig, description="Where versions are kept.")
    publish: PublisherConfig = Field(default_factory=PublisherConfig, description="Snapshots and deltas.")
    follow: FollowerConfig = Field(default_factory=FollowerConfig, description="How engines follow refs.")
    collect: CollectConfig = Field(default_factory=CollectConfig, description="What garbage collection keeps.")
    relay: RelayConfig = Field(default_factory=RelayConfig, description="A relay, and the cache of a follower.")
    supervise: SuperviseConfig = Field(
        default_factory=SuperviseConfig, description="When `up` restarts workers and when it gives up."
    )
    ray: RayConfig = Field(default_factory=RayConfig, description="Where `ostinato up --on ray` places the workers.")
    housekeeping: HousekeepingConfig = Field(default_factory=HousekeepingConfig, description="What `up` tidies up.")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="The gate's suite and statistics.")
    release: ReleaseConfig = Field(default_factory=ReleaseConfig, description="Canary, guard, rollback.")
    adapt: AdaptConfig = Field(default_factory=AdaptConfig, description="Answers that lean to each person.")
    worlds: WorldsConfig = Field(default_factory=WorldsConfig, description="Rollouts in simulated worlds.")
    compute: ComputeConfig = Field(
        default_factory=ComputeConfig, description="How compute moves between serving and sampling."
    )
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig, description="Limits of generated code.")


def keys(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key as its dotted path and its field, in the order of the tree."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{before}{name}.")
        else:
            yield f"{before}{name}", field


def nearest(asked: str, known: Sequence[str]) -> str | None:
    """Return the known key that is most similar to `asked`; None if none is similar enough.

    Example: ``nearest("train.lr", ["train.clip", "train.learning_rate"]) == "train.learning_rate"``
    """
    best = max(known, key=lambda name: _similarity(asked, name), default=None)
    return best if best is not None and _similarity(asked, best) >= _MIN_SIMILARITY else None


_MIN_SIMILARITY = 0.55


def _similarity(asked: str, known: str) -> float:
    """Return the similarity of two keys, from 0 to 1. The last part weighs most; in `asked` it may be initials (lr) or one word (rate)."""
    (section, _, leaf), (known_section, _, known_leaf) = asked.rpartition("."), known.rpartition(".")
    words = known_leaf.split("_")
    best = _ratio(leaf, known_leaf)
    if len(leaf) > 1 and leaf == "".join(word[0] for word in words if word):
        best = max(best, 0.9)
    if leaf in words or (len(leaf) > 2 and known_leaf.startswith(leaf)):
        best = max(best, 0.8)
    return 0.75 * best + 0.25 * _ratio(section, known_section)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def as_override(key: str, value: str) -> str:
    """Return an override for `load` whose value is this string, escaped. Example: ``as_override("a.b", "c") == 'a.b="c"'``"""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse ``"train.lr=1e-5"`` into (["train", "lr"], 1e-05). A value that is not TOML is a bare string. Raises BadConfig."""
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise BadConfig(f"--set {text!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    except RecursionError:
        raise BadConfig(f"--set {path.strip()}: the value is nested too deeply") from None
    return path.strip().split("."), value


def put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set tree[a][b] = value for the path [a, b], creating missing sections. Raises BadConfig if a part of the path is a value."""
    for key in path[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise BadConfig(f"--set {'.'.join(path)}: {key!r} is a value, not a section")
        tree = cast("dict[str, Any]", below)
    tree[path[-1]] = value


def leaves(tree: Mapping[str, Any], before: str = "") -> list[str]:
    """Return the dotted paths of a tree's values. Example: ``leaves({"a": {"b": 1, "c": 2}}) == ["a.b", "a.c"]``"""
    paths: list[str] = []
    for key, value in tree.items():
        below = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        paths += leaves(below, f"{before}{key}.") if below else [f"{before}{key}"]
    return paths


def explain(model: type[BaseModel], error: ValidationError, origin: Mapping[str, str]) -> BadConfig:
    """Return a BadConfig that names the origin, the key and the remedy of each mistake. `origin` maps each key that was set to the file
    or option that set it.
    """
    known = dict(keys(model))
    lines: list[str] = []

    def add(path: str, line: str) -> None:
        near = {origin[key] for key in origin if f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}.")}
        where = {origin[path]} if path in origin else near or set(origin.values())
        lines.append(f"{' and '.join(sorted(where, reverse=True))}: {line}")

    for item in error.errors():
        path, given = ".".join(str(part) for part in item["loc"]), item["input"]
        if item["type"] == "extra_forbidden":
            below = leaves(cast("dict[str, Any]", given), f"{path}.") if isinstance(given, dict) else []
            for name in below or [path]:
                add(name, _unknown(name, list(known)))
        else:
            secret = any(path.startswith(name) and "Secret" in str(field.annotation) for name, field in known.items())
            section = item["type"] == "value_error" and isinstance(given, dict)  # too long to show
            shown = "" if secret or section else f" (got {given!r})"
            add(path, f"{path}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return BadConfig("; ".join(lines))


def _unknown(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known)
    if close is not None:
        return f"unknown key {name!r}; did you mean {close!r}?"
    section = name.rpartition(".")[0]
    here = [key for key in known if key.startswith(f"{section}.")] or sorted({key.partition(".")[0] for key in known})
    return f"unknown key {name!r}; valid here: {', '.join(key.removeprefix(f'{section}.') for key in here)}"


def read_file(path: Path | None) -> dict[str, Any]:
    """Return a configuration file's raw tree; without a path an empty one. Raises BadConfig for a missing or invalid file."""
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise BadConfig(f"no configuration file at {path}; name one that is there, or none for the defaults") from None
    except OSError as error:
        raise BadConfig(f"{path} cannot be read: {error.strerror}; check --config") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not valid {path.suffix.lstrip('.') or 'TOML'}: {error}") from error
    except RecursionError:
        raise BadConfig(f"{path}: nested too deeply for a configuration") from None
    if not isinstance(tree, dict):
        raise BadConfig(f"{path}: a configuration is an object of sections, and this is none")
    return cast("dict[str, Any]", tree)


def with_nulls(tree: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the tree with None in place of the string "null" wherever the model allows None, since TOML has no null."""
    result = dict(tree)
    for name, field in model.model_fields.items():
        value, kinds = result.get(name), [field.annotation, *get_args(field.annotation)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if value == "null" and type(None) in kinds:
            result[name] = None
        elif section is not None and isinstance(value, dict):
            tree_below = cast("dict[str, Any]", value)
            if get_origin(field.annotation) in (dict, Mapping):  # a mapping from names to sections
                result[name] = {
                    key: with_nulls(each, section) if isinstance(each, dict) else each
                    for key, each in tree_below.items()
                }
            else:
                result[name] = with_nulls(tree_below, section)
        elif section is not None and isinstance(value, list):
            tables = cast("list[Any]", value)
            result[name] = [with_nulls(each, section) if isinstance(each, dict) else each for each in tables]
    return result


def origins(path: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Return the origin of each key that is set. Example: ``{"train.clip": "ostinato.toml", "listen.port": "--set"}``"""
    result = dict.fromkeys(leaves(read_file(path)), str(path))
    for override in overrides:
        name, value = parse_override(override)
        result |= dict.fromkeys(
            leaves(value, f"{'.'.join(name)}.") if isinstance(value, dict) else [".".join(name)], "--set"
        )
    return result


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load and validate the configuration: defaults, then the file, then the overrides.

    Raises BadConfig that names every wrong key and the most similar valid one.

    Example: ``load(Path("ostinato.toml"), ["train.learning_rate=1e-5"])``
    """
    return validated(Config, read_file(path), path, overrides)


def validated(model: type[M], tree: dict[str, Any], path: Path | None, overrides: Sequence[str]) -> M:
    """Return `tree`, read from `path`, with the overrides as a validated model. Raises the BadConfig of `explain`."""
    for override in overrides:
        put(tree, *parse_override(override))
    try:
        return model.model_validate(with_nulls(tree, model))
    except ValidationError as error:
        raise explain(model, error, origins(path, overrides)) from None


def load_saved(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Load a run's saved configuration for code that only reads the run. Returns it and the unknown keys that were dropped.

    Unknown keys come from another version of Ostinato. Raises BadConfig as `load` for every other mistake.
    """
    tree = read_file(path)
    unknown: list[str] = []
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        strange = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        unknown = sorted(".".join(map(str, loc)) for loc in strange if _drop(tree, loc))
    return validated(Config, tree, path, overrides), unknown


def tenant_of(path: Path) -> str:
    """Return the tenant whose branch a run trains, from its saved configuration; "" if there is none or it cannot be read."""
    with contextlib.suppress(BadConfig, AttributeError):  # `run` is not a section
        return str(read_file(path).get("run", {}).get("tenant", ""))
    return ""


def _drop(tree: Any, loc: Sequence[str | int]) -> bool:
    """Remove the value at `loc`. Return False if there is none."""
    for step in loc[:-1]:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return False
    return isinstance(tree, dict) and cast("dict[Any, Any]", tree).pop(loc[-1], _MISSING) is not _MISSING


_MISSING = object()


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration, secrets included, as a JSON file that only its owner can read. The workers start from it.

    The file is replaced atomically. Raises StorageFull.
    """
    write_private(path, json.dumps(plain(config), indent=1))


def write_private(path: Path, text: str) -> None:
    """Atomically write a file that only its owner can read. Raises StorageFull."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text, durable=False)  # not synced: every start writes it again
    except OSError as error:
        raise StorageFull(f"{path} cannot be written: {error.strerror}; make run.directory writable") from error


def plain(config: Config) -> dict[str, Any]:
    """Return the whole configuration as JSON values, secrets included."""
    tree, serve = config.model_dump(mode="json"), config.serve
    shown: dict[str, Any] = tree["serve"]
    shown["api_keys"] = [key.get_secret_value() for key in serve.api_keys]
    shown["user_keys"] = [key.get_secret_value() for key in serve.user_keys]
    shown["admin_key"] = serve.admin_key.get_secret_value() if serve.admin_key else None
    shown["metrics_key"] = serve.metrics_key.get_secret_value() if serve.metrics_key else None
    shown["otlp"]["headers"] = {name: value.get_secret_value() for name, value in serve.otlp.headers.items()}
    return tree
