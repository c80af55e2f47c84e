"""Copies of whole directories, such as checkpoints, under the weight store's URL, for other hosts.

The layout is ``<prefix>/<name>/<file>``. One of a directory's files, its seal, is uploaded last and deleted first; a copy without it counts
as incomplete. Bytes are not verified here: whoever fetches a directory must verify it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final

import obstore

from ostinato.core.errors import Corrupt, NotFound, TooLarge
from ostinato.core.files import private
from ostinato.core.parallel import for_each
from ostinato.weights.config import BucketConfig
from ostinato.weights.store.disk import storage_refusals
from ostinato.weights.store.object_storage import connect, directory_of, in_directory, listed, refusals

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_PARTS: Final = 10_000  # of one upload to S3


class Copies:
    """Copies of directories of plain files, each written once and then only read or deleted.

    Args:
        config: a bucket or a directory.
        prefix: the path of the copies under it.
        seal: the file that marks a copy as complete.

    Example::

        copies = Copies(BucketConfig(url="s3://weights/run-7"), "checkpoints", "checkpoint.json")
        await copies.send(Path("checkpoints/00000005-0f3a"))
        await copies.fetch("00000005-0f3a", {"weights.safetensors": 4096}, Path("fetched"))

    Raises (all methods): Unavailable if the bucket cannot be reached, Unauthorized if it denies access.
    """

    def __init__(self, config: BucketConfig, prefix: str, seal: str, *, inside: Any = None) -> None:
        self.url, self._config, self._prefix, self._seal = config.url, config, prefix, seal
        self._store = inside if inside is not None else connect(config)
        self._directory = directory_of(config.url) / prefix if in_directory(config.url) else None

    async def names(self) -> list[str]:
        """Return the names of the complete copies, sorted."""
        return sorted(name for name, files in (await self._list(f"{self._prefix}/")).items() if self._seal in files)

    async def torn(self) -> list[str]:
        """Return the names of the incomplete copies, sorted: those that were partly sent or deleted, or are being sent now."""
        copies = await self._list(f"{self._prefix}/")
        if self._directory is not None and self._directory.is_dir():
            # the listing hides the half-written file of a killed sender
            copies |= {path.name: {} for path in self._directory.iterdir() if path.name not in copies}
        return sorted(name for name, files in copies.items() if self._seal not in files and _NAME.fullmatch(name))

    async def send(self, directory: Path) -> None:
        """Upload a directory under its own name. An interrupted copy counts as incomplete and can be sent again."""
        if directory.name in await self.names():
            return
        for file in sorted(directory.iterdir(), key=lambda file: file.name == self._seal):
            part = max(self._config.part_bytes, -(-file.stat().st_size // _MOST_PARTS))
            with refusals(self.url, f"sending {file}"):
                await obstore.put_async(
                    self._store, self._path(directory.name, file.name), file, chunk_size=part, max_concurrency=4
                )

    async def read(self, name: str, file: str, most: int) -> bytes:
        """Return a small file of a copy. Raises NotFound; TooLarge for a file of more than `most` bytes."""
        sizes = await self._files(name)
        if file not in sizes:
            raise NotFound(f"the copy {self._prefix}/{name} at {self.url} has no {file}", field="file")
        if sizes[file] > most:
            raise TooLarge(f"{self._path(name, file)} has {sizes[file]} bytes; the limit is {most}", field="file")
        return bytes(await self._part(self._path(name, file), 0, sizes[file])) if sizes[file] else b""

    async def fetch(self, name: str, files: Mapping[str, int], into: Path) -> None:
        """Download files of these sizes to the directory `into`, which must not exist. Each file is fsynced; the directory is not.

        Raises NotFound, Corrupt for a file of another size, StorageFull.
        """
        sizes = await self._files(name)
        if odd := [file for file, size in files.items() if sizes.get(file) != size]:
            raise Corrupt(f"{self._path(name, odd[0])} has {sizes.get(odd[0], 0)} bytes, not {files[odd[0]]}")
        with storage_refusals(f"making {into}"):
            into.mkdir(mode=0o700, parents=True)
        for file, size in files.items():
            await self._fetch_file(self._path(name, file), size, into / file)

    async def delete(self, name: str) -> None:
        """Delete a copy. A copy that does not exist is not an error."""
        files = (await self._list(f"{self._prefix}/{name}/")).get(name, {})
        for file in sorted(files, key=lambda file: file != self._seal):
            with refusals(self.url, f"deleting {self._prefix}/{name}"), contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._store, self._path(name, file))
        if self._directory is not None and _NAME.fullmatch(name):
            # the listing hides half-written files that a killed sender left
            await asyncio.to_thread(shutil.rmtree, self._directory / name, ignore_errors=True)

    # ------------------------------------------------------------ internals

    async def _files(self, name: str) -> dict[str, int]:
        """Return the files of a complete copy with their sizes. Raises NotFound."""
        files = (await self._list(f"{self._prefix}/{name}/")).get(name, {})
        if self._seal not in files:
            raise NotFound(
                f"there is no complete copy {self._prefix}/{name} at {self.url}; one that was interrupted has to be made again",
                field="name",
            )
        return files

    def _path(self, name: str, file: str) -> str:
        return f"{self._prefix}/{name}/{file}"

    async def _list(self, under: str) -> dict[str, dict[str, int]]:
        """Return {directory name: {file: size}}. Paths of another form are skipped."""
        with refusals(self.url, f"listing {under}"):
            items = await listed(self._store, under, self._config.retries)
        copies: dict[str, dict[str, int]] = {}
        for item in items:
            name, *rest = str(item["path"]).removeprefix(f"{self._prefix}/").split("/")
            if len(rest) == 1 and _NAME.fullmatch(name) and _NAME.fullmatch(rest[0]):
                copies.setdefault(name, {})[rest[0]] = item["size"]
        return copies

    async def _fetch_file(self, path: str, size: int, target: Path) -> None:
        part = self._config.part_bytes
        with storage_refusals(f"writing {target}"), FileIO(target, "x", opener=private) as file:

            async def fetch(start: int) -> None:
                data = await self._part(path, start, min(part, size - start))
                await asyncio.to_thread(_write, file.fileno(), memoryview(data), start)

            await for_each(range(0, size, part), self._config.parallel, fetch)
            await asyncio.to_thread(os.fsync, file.fileno())

    async def _part(self, path: str, start: int, length: int) -> Any:
        with refusals(self.url, f"reading {path}", missing=f"{path} is no longer at {self.url}"):
            return await obstore.get_range_async(self._store, path, start=start, length=length)


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:  # a disk that fills up writes a part, and only the next write fails
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
