"""The trainer's checkpoints between hosts: copies beside the weights, for the trainer that continues the run elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ostinato.app.storage import Run
from ostinato.core.errors import Corrupt, NotFound, OstinatoError, StorageFull
from ostinato.core.records import Batch
from ostinato.record.rowlog import RowLog
from ostinato.train.checkpoint import MANIFEST, adopt, partial_of, stored
from ostinato.weights.store.copies import Copies
from ostinato.weights.store.location import is_relay
from ostinato.weights.version.manifest import Signature
from ostinato.weights.version.signing import Signer, check_checkpoint

_log = logging.getLogger(__name__)

_SIGNATURE = "signature.json"


class SharedCheckpoints:
    """Sends checkpoints in the background, and fetches one that is newer than this host's.

    `trouble` says why the last copy failed; None if it did not.

    Args:
        copies: where they are shared.
        place: this host's checkpoints.
        keep: how many of the newest copies are kept.
        signer: signs what is sent; None: it is not signed.
        trusted: public keys; what none of them signed is not fetched. Empty: everything is.
    """

    def __init__(
        self, copies: Copies, place: Path, keep: int, signer: Signer | None = None, trusted: Sequence[str] = ()
    ) -> None:
        self._copies, self._place, self._keep, self._signer, self._trusted = copies, place, keep, signer, trusted
        self._sending: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    async def fetch_newer(self, last_step: int) -> str | None:
        """Fetch the newest whole copy if this host has no checkpoint of that step or a later one. Returns its name, or None.

        A copy of a step after `last_step`, the log's last, is not of this log as it is now. Raises Unavailable, Unauthorized.
        """
        own = max((_step(path.name) for path in stored(self._place)), default=-1)
        for name in sorted(await self._copies.names(), key=_step, reverse=True):
            if _step(name) <= own:
                return None
            if _step(name) > last_step:
                continue
            partial = partial_of(self._place, name)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                await self._copies.fetch(name, partial)
                check_checkpoint((partial / MANIFEST).read_bytes(), _signature(partial), self._trusted)
                await asyncio.to_thread(adopt, partial)
            except (Corrupt, NotFound, StorageFull) as error:
                _log.warning("the shared checkpoint %s cannot be used: %s", name, error)
                continue
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return name
        return None

    def begin(self) -> None:
        """Start to send the newest checkpoint. If an earlier one is still on its way, this one is left out."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def close(self) -> None:
        """Stop sending. A copy that is not complete is not there."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        linking = self._place / ".sending"
        try:
            linked = _link(stored(self._place)[0], linking)
            if self._signer is not None:
                signature = self._signer.sign_checkpoint((linked / MANIFEST).read_bytes())
                (linked / _SIGNATURE).write_text(signature.model_dump_json())
            await self._copies.send(linked)
            await self._delete_old()
            self.trouble = None
        except (OstinatoError, OSError) as error:
            self.trouble = f"the checkpoint is not shared: {error}"
            _log.warning("%s; the next one is tried again", self.trouble)
        finally:
            shutil.rmtree(linking, ignore_errors=True)

    async def _delete_old(self) -> None:
        """Delete all but the newest copies up to this host's newest checkpoint, and what earlier trainers sent only in part."""
        newest = _step(stored(self._place)[0].name)
        whole = sorted((name for name in await self._copies.names() if _step(name) <= newest), key=_step)
        torn = [name for name in await self._copies.torn() if _step(name) < newest]
        for old in (*whole[: -self._keep], *torn):
            await self._copies.delete(old)


def _step(name: str) -> int:
    """The step in a checkpoint's name; -1 if it is none."""
    step = name.split("-")[0]
    return int(step) if step.isdecimal() else -1


def _link(directory: Path, under: Path) -> Path:
    """Hard links to a checkpoint's files, which stay while newer checkpoints replace it."""
    shutil.rmtree(under, ignore_errors=True)
    (linked := under / directory.name).mkdir(parents=True)
    for file in directory.iterdir():
        if file.name != _SIGNATURE:
            os.link(file, linked / file.name)
    return linked


def _signature(directory: Path) -> Signature | None:
    try:
        return Signature.model_validate_json((directory / _SIGNATURE).read_bytes())
    except (OSError, ValueError):
        return None


def last_step(log: RowLog) -> int:
    """The step of the log's newest batch; 0 before the first."""
    return max((row.step for _, row in log.tail(1, {Batch}) if isinstance(row, Batch)), default=0)


def shared_checkpoints(run: Run) -> SharedCheckpoints | None:
    """Where the run's trainers share checkpoints; None if no other host can have a trainer of it, or the settings say no."""
    config = run.config
    elsewhere = config.record.url and config.weights.url and not is_relay(config.weights.url)
    if not elsewhere or not config.learn.share_checkpoints:
        return None
    copies = Copies(config.weights, f"checkpoints/{config.record.namespace}", MANIFEST)
    signer = None if config.publish.key is None else Signer.load(config.publish.key)
    trusted = (*config.follow.trusted, *(() if signer is None else (signer.public,)))
    return SharedCheckpoints(copies, run.home.checkpoints, config.learn.keep_checkpoints, signer, trusted)
