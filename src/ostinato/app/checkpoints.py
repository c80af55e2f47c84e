"""Sharing of the trainer's checkpoints between hosts: copies beside the weights, from which a trainer on another host continues the run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from ostinato.app.storage import Run
from ostinato.core.errors import Corrupt, NotFound, OstinatoError, StorageFull, TooLarge, Unauthorized
from ostinato.core.files import write_atomic
from ostinato.core.records import Batch
from ostinato.record.rowlog import RowLog
from ostinato.train.checkpoint import MANIFEST, adopt, files_of, partial_of, stored, sweep
from ostinato.weights.store.copies import Copies
from ostinato.weights.store.object_storage import is_relay
from ostinato.weights.version.content import hash_of
from ostinato.weights.version.manifest import Signature
from ostinato.weights.version.signing import Signer, check_checkpoint

_log = logging.getLogger(__name__)

_SIGNATURE, _BATCH = "signature.json", "batch"  # files beside a copy's own
_SENDING = ".sending"
_MAX_MANIFEST = 64 << 20  # bytes; a manifest has about 100 per tensor and rank

BatchOf = Callable[[int], Awaitable[str]]
"""Returns the digest of a recorded step's batch; "" for a step that the log does not have."""


class SharedCheckpoints:
    """Sends checkpoints in the background, and fetches one that is newer than this host's.

    Each copy names the digest of its last step's batch. A copy of another log, or of rows that the log lost in a failover, is ignored.

    `trouble` says why the last transfer failed; None if it did not.

    Args:
        copies: the store of shared checkpoints.
        place: this host's checkpoints.
        keep: how many of the newest copies are kept.
        batch_of: returns the log's digest of a step.
        signer: signs what is sent; None: nothing is signed.
        trusted: public keys; a copy must be signed by one of them to be fetched. Empty: every copy is fetched.
    """

    def __init__(
        self,
        copies: Copies,
        place: Path,
        keep: int,
        batch_of: BatchOf,
        signer: Signer | None = None,
        trusted: Sequence[str] = (),
    ) -> None:
        self._copies, self._place, self._keep, self._batch_of = copies, place, keep, batch_of
        self._signer, self._trusted = signer, trusted
        self._sending: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    async def fetch_newer(self) -> str | None:
        """Fetch the newest complete copy if it is newer than all checkpoints of this host. Return its name, or None.

        First removes what a killed process left. Raises Unavailable; Unauthorized if this host has no checkpoint to continue from.
        """
        shutil.rmtree(self._place / _SENDING, ignore_errors=True)
        sweep(self._place)
        own = max((_step(path.name) for path in stored(self._place)), default=-1)
        try:
            for name in sorted(await self._copies.names(), key=_step, reverse=True):
                if _step(name) <= own:
                    break
                if await self._fetched(name):
                    return name
        except Unauthorized as error:
            if own < 0:
                raise
            self.trouble = f"shared checkpoints cannot be read: {error}"
            _log.warning("%s; going on from step %d", self.trouble, own)
        return None

    async def _fetched(self, name: str) -> bool:
        """Fetch a copy and verify it. Return False, with a log message, if it cannot be used."""
        batch = await self._batch_of(_step(name))
        place = partial_of(self._place, name)
        try:
            if not batch or await self._batch(name) != batch:
                raise Corrupt("its last batch is not the one in the log")
            manifest = await self._copies.read(name, MANIFEST, _MAX_MANIFEST)
            check_checkpoint(manifest, batch, await self._signature(name), self._trusted)
            await self._copies.fetch(name, {MANIFEST: len(manifest)} | files_of(manifest), place)
            await asyncio.to_thread(adopt, place)
        except (Corrupt, NotFound, TooLarge, StorageFull, OSError) as error:
            _log.warning("the shared checkpoint %s cannot be used: %s", name, error)
            return False
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return True

    async def _batch(self, name: str) -> str:
        """Return the digest of the batch that a copy names; "" if it names none or it cannot be read."""
        try:
            return (await self._copies.read(name, _BATCH, 100)).decode()
        except (NotFound, TooLarge, ValueError):
            return ""

    async def _signature(self, name: str) -> Signature | None:
        try:
            return Signature.model_validate_json(await self._copies.read(name, _SIGNATURE, 1000))
        except (NotFound, TooLarge, ValueError):
            return None

    def begin(self) -> None:
        """Start sending the newest checkpoint. If an earlier one is still being sent, this one is skipped."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def close(self) -> None:
        """Stop sending. An incomplete copy does not count."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        linking = self._place / _SENDING
        try:
            linked = link_checkpoint(stored(self._place)[0], linking)
            batch = await self._batch_of(_step(linked.name))
            write_atomic(linked / _BATCH, batch, durable=False)
            if self._signer is not None:
                signature = self._signer.sign_checkpoint((linked / MANIFEST).read_bytes(), batch)
                write_atomic(linked / _SIGNATURE, signature.model_dump_json(), durable=False)
            await self._copies.send(linked)
            await self._delete_old()
            self.trouble = None
        except (OstinatoError, OSError) as error:
            self.trouble = f"the checkpoint is not shared: {error}"
            _log.warning("%s; the next one is tried again", self.trouble)
        finally:
            shutil.rmtree(linking, ignore_errors=True)

    async def _delete_old(self) -> None:
        """Delete all but the newest `keep` copies up to this host's newest checkpoint, and incomplete ones of earlier trainers.

        Copies whose batch is not the log's are left alone and do not count.
        """
        newest = _step(stored(self._place)[0].name)
        until = sorted((name for name in await self._copies.names() if _step(name) <= newest), key=_step)
        whole = [name for name in until if await self._batch(name) == await self._batch_of(_step(name))]
        torn = [name for name in await self._copies.torn() if _step(name) < newest]
        for old in (*whole[: -self._keep], *torn):
            await self._copies.delete(old)


def _step(name: str) -> int:
    """Return the step in a checkpoint's name; -1 if there is none."""
    step = name.split("-")[0]
    return int(step) if step.isdecimal() else -1


def link_checkpoint(directory: Path, under: Path) -> Path:
    """Create hard links to a checkpoint's files, which stay when newer checkpoints replace it. Return their directory."""
    shutil.rmtree(under, ignore_errors=True)
    under.mkdir(mode=0o700, parents=True)
    (linked := under / directory.name).mkdir(mode=0o700)
    for file in directory.iterdir():
        os.link(file, linked / file.name)
    return linked


async def batch_digest(log: RowLog, step: int) -> str:
    """Return a digest of a step's batch in the log, the same on all hosts; "" if there is none."""
    found = await log.find(Batch, [(step,)])
    return "".join(hash_of(json.dumps([row.step, row.turns, row.reference.hash, row.at]).encode()) for row in found)


def shared_checkpoints(run: Run) -> SharedCheckpoints | None:
    """Return the `SharedCheckpoints` of a run; None if no other host can have a trainer of it, or the settings turn it off."""
    config = run.config
    elsewhere = config.record.url and config.weights.url and not is_relay(config.weights.url)
    if not elsewhere or not config.learn.share_checkpoints:
        return None
    copies = Copies(config.weights, f"checkpoints/{config.record.namespace}", MANIFEST)
    signer = None if config.publish.key is None else Signer.load(config.publish.key)
    trusted = (*config.follow.trusted, *(() if signer is None else (signer.public,)))
    batch_of = partial(batch_digest, run.log)
    return SharedCheckpoints(copies, run.home.checkpoints, config.learn.keep_checkpoints, batch_of, signer, trusted)
