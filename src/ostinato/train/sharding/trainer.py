"""Several processes that act as one trainer: the first takes part itself, and sends the others their calls through pipes.

Every rank runs the same `PolicyTrainer` and gets the same calls, so all of them admit, judge and refuse alike. The pipes end with the
first rank, and gloo's connections with any rank: whichever is killed, the others end at their next call. NCCL does not report the end of
another rank while it waits for it, so on GPUs a thread watches the parent and ends the rank within seconds. An unfinished step is
lost with them and repeated from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar, cast

import torch
import torch.distributed as dist

from ostinato.core.errors import OstinatoError, Unavailable
from ostinato.core.numerics import Contract
from ostinato.core.records import PolicyVersion, SteeringBasis
from ostinato.core.samples import Sample
from ostinato.core.weights import Learned, Weights
from ostinato.model.backend import OWN, ComputeBackend
from ostinato.model.linear import use_order
from ostinato.model.numerics import order_named
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.sharding.calls import RankCall, RankTask, call_line, read_call, task_line
from ostinato.train.sharding.group import RankGroup, check_ranks
from ostinato.train.trainer import PolicyTrainer, never

# ---------------------------------------------------------------- watching for lost ranks


_LOG = logging.getLogger(__name__)
_WATCH_S = 1.0  # seconds between two checks


def end_with_first(first: int) -> None:
    """End this process soon after its parent, the first rank, whose process id is `first`."""
    while os.getppid() == first:
        time.sleep(_WATCH_S)
    os._exit(1)


def end_with_others(others: Sequence[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    """End this process, the first rank, soon after any of the others ends, unless `closing` is set."""
    while not closing.wait(_WATCH_S):
        ended = {rank: code for rank, process in enumerate(others, 1) if (code := process.poll()) is not None}
        if ended and not closing.is_set():
            _LOG.error("ranks of the trainer have ended, with these exit codes: %s; so the first one ends, too", ended)
            os._exit(1)


# ---------------------------------------------------------------- returning freed memory


_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_LARGE = 1 << 17
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it makes its first tensor


def return_freed_memory() -> None:
    """Make freed blocks of 128 KiB and more go back to the system. Without glibc nothing is done.

    By default glibc raises that threshold to the largest block freed so far, up to 32 MiB. Gathered layers, activations and gradients of
    different sizes are then interleaved in one heap that never shrinks during a step.

    Memory that is new to the process costs a page fault for every 4 KiB, so torch uses pages of 2 MiB from now on, if it has made no
    tensor yet. The environment variable THP_MEM_ALLOC_ENABLE, if set, takes precedence.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        if _LARGE_PAGES not in os.environ:
            os.environ[_LARGE_PAGES] = "1"
            torch.empty(1)
            del os.environ[_LARGE_PAGES]  # not for programs that this process starts


# ---------------------------------------------------------------- sharded trainer


_EXIT_TIMEOUT_S = 10.0  # most seconds for a rank to exit
_POLL_S = 0.05  # seconds between two checks of whether a rank is ready
_T = TypeVar("_T")
spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""Starts the process of a rank. Tests replace it by a fork of a process that has already imported the libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """A module that runs in place of `ostinato.train.sharding.rank`, and publishes as its `settings` say."""

    module: str
    settings: str


class ShardedTrainer:
    """`config.ranks` processes on this machine as one `PolicyTrainer`. `close` ends the others.

    Raises as `PolicyTrainer` does, and Unavailable when a rank is lost, after which the remaining ranks are of no use. On GPUs this process
    ends instead, because it may be waiting for the lost rank where no exception can reach it.

    `backend`: that of all ranks; on "cuda" each has the GPU of its number. Raises BadConfig if ranks cannot use it.

    `program`: the module that the other ranks run. `lines` are then the sockets to them, in rank order, over which their published parts
    are requested.

    Example::

        trainer = ShardedTrainer(path, TrainConfig(compute="bf16", ranks=2))
        learned = trainer.step(samples, references)
    """

    def __init__(
        self,
        model: Path,
        config: TrainConfig,
        contract: Contract | None = None,
        program: RankProgram | None = None,
        backend: ComputeBackend = OWN,
    ) -> None:
        check_ranks(config, backend)
        return_freed_memory()
        store = _rendezvous_store(config.ranks)
        self.lines: list[socket.socket] = []
        self.others: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.ranks):
            task = RankTask(model=model, config=config, contract=contract, rank=rank, port=store.port, backend=backend)
            if program is None:
                self.others.append(_start_rank(task, "ostinato.train.sharding.rank"))
                continue
            ours, theirs = socket.socketpair()
            with theirs:
                told = replace(task, line=theirs.fileno(), settings=program.settings)
                self.others.append(_start_rank(told, program.module, theirs.fileno()))
            self.lines.append(ours)
        self._group: RankGroup | None = None
        self._bases: tuple[SteeringBasis, ...] = ()
        self._closing = threading.Event()
        if self.others and backend.device != "cpu":
            threading.Thread(target=end_with_others, args=(self.others, self._closing), daemon=True).start()
        try:
            self._await_all(store)
            group = self._detect_lost_rank(lambda: _join(0, config, backend, store))
            self._group = group
            self._own = self._detect_lost_rank(lambda: PolicyTrainer(model, config, contract, group))
        except BaseException:
            self.close()
            raise

    @property
    def step_count(self) -> int:
        """The number of optimizer steps behind the weights."""
        return self._own.step_count

    def step(
        self, samples: Sequence[Sample], references: References | None = None, stop: Callable[[], bool] = never
    ) -> Learned:
        """See `PolicyTrainer.step`; `stop` is called at every micro-batch."""
        held = references or References(fetch=_no_weights)
        call = RankCall(
            method="step",
            samples=tuple(samples),
            bases=self._bases,
            held=references is not None,
            release=held.release,
            anchor=held.anchor,
        )
        return self._call_all(call, lambda: self._own.step(samples, self._fetching_for_all(references), stop))

    def set_bases(self, rows: Sequence[SteeringBasis]) -> None:
        """See `PolicyTrainer.set_bases`; the other ranks get them with the next step."""
        self._bases = tuple(rows)
        self._own.set_bases(rows)

    def go_back(self, weights: Weights, number: int | None = None) -> None:
        """See `PolicyTrainer.go_back`."""
        self._call_all(RankCall(method="go_back", number=number), lambda: self._own.go_back(weights, number))

    def hold_nothing(self) -> None:
        """See `PolicyTrainer.hold_nothing`."""
        self._call_all(RankCall(method="hold_nothing"), self._own.hold_nothing)

    def skip_step(self) -> None:
        """See `PolicyTrainer.skip_step`."""
        self._call_all(RankCall(method="skip_step"), self._own.skip_step)

    def weights(self) -> Weights:
        """See `PolicyTrainer.weights`; this process then has all of them."""
        return self._call_all(RankCall(method="weights"), self._own.weights)

    def present(self) -> Learned:
        """See `PolicyTrainer.present`."""
        return self._call_all(RankCall(method="present"), self._own.present)

    def save(self, directory: Path, *, cursor: int, keep: int) -> None:
        """See `PolicyTrainer.save`."""
        call = RankCall(method="save", directory=directory, cursor=cursor, keep=keep)
        self._call_all(call, lambda: self._own.save(directory, cursor=cursor, keep=keep))

    def resume(self, directory: Path) -> bool:
        """See `PolicyTrainer.resume`."""
        return self._call_all(RankCall(method="resume", directory=directory), lambda: self._own.resume(directory))

    def close(self) -> None:
        """End the other ranks, and leave the group. Idempotent."""
        self._closing.set()
        for process in self.others:
            with contextlib.suppress(BrokenPipeError):
                cast("IO[bytes]", process.stdin).close()
        if self._group is not None:  # before waiting for the others, since ranks must leave an NCCL group together
            self._group.close()
            self._group = None
        for process in self.others:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _await_all(self, store: dist.TCPStore) -> None:
        """Wait until all other ranks are ready; raises if one has ended, because the rest would wait for it forever."""
        for rank, process in enumerate(self.others, 1):
            while not store.check([_ready_key(rank)]):
                if process.poll() is not None:
                    raise self._lost(f"rank {rank} ended before it was ready")
                time.sleep(_POLL_S)

    def _fetching_for_all(self, references: References | None) -> References | None:
        """Return references whose weights are fetched here for all ranks; if that fails, all ranks are told."""
        if references is None:
            return None
        group = cast("RankGroup", self._group)

        def fetch(policy: PolicyVersion) -> Weights:
            try:
                weights = references.fetch(policy)
            except BaseException:
                group.any(True)
                raise
            group.any(False)
            return weights

        return References(release=references.release, anchor=references.anchor, fetch=fetch)

    def _call_all(self, call: RankCall, here: Callable[[], _T]) -> _T:
        """Call a method on every rank; `here` calls it on this one."""
        line = call_line(call)
        for rank, process in enumerate(self.others, 1):
            pipe = cast("IO[bytes]", process.stdin)
            try:
                pipe.write(line)
                pipe.flush()
            except OSError as error:
                raise self._lost(f"rank {rank} accepts no more calls") from error
        return self._detect_lost_rank(here)

    def _detect_lost_rank(self, act: Callable[[], _T]) -> _T:
        """Call `act` and return its result. Raises Unavailable if it failed because a rank is lost."""
        try:
            return act()
        except RuntimeError as error:  # gloo's, when a connection ends
            if any(process.poll() is not None for process in self.others) or "onnection" in str(error):
                raise self._lost(str(error)) from error
            raise

    def _lost(self, why: str) -> Unavailable:
        ended = {rank: code for rank, process in enumerate(self.others, 1) if (code := process.poll()) is not None}
        return Unavailable(
            f"a rank of the trainer is lost ({why[:200]}; ended so far, with their exit codes: {ended}): the trainer must start again "
            "from the last checkpoint"
        )


def _rendezvous_store(ranks: int) -> dist.TCPStore:
    """Create the store at which the ranks meet, on the loopback interface only: by default a TCPStore listens on every address."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _join(rank: int, config: TrainConfig, backend: ComputeBackend, store: dist.TCPStore) -> RankGroup:
    return RankGroup.join(
        rank=rank, count=config.ranks, store=store, context_ranks=config.context_ranks, backend=backend
    )


def _ready_key(rank: int) -> str:
    return f"rank {rank} is here"


def _no_weights(policy: PolicyVersion) -> Weights:
    raise Unavailable(f"no source was given for the weights of {policy}")


def _start_rank(task: RankTask, module: str, *lines: int) -> subprocess.Popen[bytes]:
    process = spawn([sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=lines)
    pipe = cast("IO[bytes]", process.stdin)
    pipe.write(task_line(task))
    pipe.flush()
    return process


def take_part(task: RankTask, calls: IO[bytes], on_learned: Callable[[Learned], None]) -> None:
    """Run a rank: make the same calls as the first rank, until there are no more. What the first rank refuses is refused here too.

    `on_learned` receives this rank's part of each publishable result.
    """
    return_freed_memory()
    torch.set_num_threads(task.config.threads)
    if task.contract is not None and task.contract.order:
        use_order(order_named(task.contract.order))
    store = dist.TCPStore("127.0.0.1", task.port, task.config.ranks, is_master=False)
    store.set(_ready_key(task.rank), "")
    if task.backend.device != "cpu":
        threading.Thread(target=end_with_first, args=(os.getppid(),), daemon=True).start()
    group = _join(task.rank, task.config, task.backend, store)
    trainer = PolicyTrainer(task.model, task.config, task.contract, group)
    for line in calls:
        try:
            _dispatch(trainer, read_call(line), group, on_learned)
        except OstinatoError:  # raised on the first rank too, which reports it to its caller
            continue
    group.close()


def _dispatch(trainer: PolicyTrainer, call: RankCall, group: RankGroup, on_learned: Callable[[Learned], None]) -> None:
    def fetch(policy: PolicyVersion) -> Weights:
        if group.any(False):
            raise Unavailable(f"the first rank did not get the weights of {policy}")
        return {}

    match call.method:
        case "step":
            references = References(release=call.release, anchor=call.anchor, fetch=fetch)
            trainer.set_bases(call.bases)
            on_learned(trainer.step(call.samples, references if call.held else None))
        case "go_back":
            trainer.go_back({}, call.number)
        case "hold_nothing" | "skip_step" | "weights":
            getattr(trainer, call.method)()
        case "present":
            on_learned(trainer.present())
        case "save":
            trainer.save(call.directory, cursor=call.cursor, keep=call.keep)
        case "resume":
            trainer.resume(call.directory)
