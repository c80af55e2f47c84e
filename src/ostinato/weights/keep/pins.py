"""Pins and leases, which protect a version from garbage collection: people set pins, processes renew leases.

Both are refs to a root. ``pin/<name>`` stays until it is removed; ``lease/<name>`` expires by the store's own clock. A holder first writes
the ref and then checks that the version exists. A collector first deletes the version's ref and then reads the refs again. One of the two
always sees the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from ostinato.core.errors import Conflict, NotFound
from ostinato.weights.store.interface import LEASES, PINS, KeptStore
from ostinato.weights.version.content import version_ref

_ATTEMPTS: Final = 8


async def pin(store: KeptStore, name: str, root: str) -> str | None:
    """Keep a version until `unpin`. Moves an existing pin of this name, and returns the root that it held before, or None.

    Raises: NotFound if the version is not in the store (the pin stays where it was); BadRequest if the name is not a valid ref name;
    Conflict if others keep moving the same pin.

    Example: ``await pin(store, "paper", policy.hash)``
    """
    return await _set(store, PINS + name, root)


async def unpin(store: KeptStore, name: str) -> str:
    """Remove a pin, and return the root that it held. Raises NotFound, naming the existing pins; Conflict."""
    root = await store.read_ref(PINS + name)
    if root is None:
        pins = [ref.removeprefix(PINS) for ref in await store.refs() if ref.startswith(PINS)]
        raise NotFound(f"there is no pin {name!r}; there are: {', '.join(pins) or 'none'}", field="name")
    await store.delete_ref(PINS + name, root)
    return root


async def hold(store: KeptStore, name: str, root: str) -> None:
    """Take or renew the lease of one holder. Must be renewed well before `collect.lease_s` has passed.

    Take the lease before reading, so that what is read is kept. Raises NotFound if the version is no longer in the store (the lease is then
    released), BadRequest if the name is not a valid ref name.

    Example: ``await hold(store, "gateway-7", policy.hash)``
    """
    await _set(store, LEASES + name, root)


async def let_go(store: KeptStore, name: str) -> None:
    """Release a lease. A lease that does not exist, or that its holder has just moved, is not an error."""
    root = await store.read_ref(LEASES + name)
    if root is not None:
        with contextlib.suppress(Conflict):
            await store.delete_ref(LEASES + name, root)


@contextlib.asynccontextmanager
async def held(store: KeptStore, name: str, root: str) -> AsyncGenerator[None]:
    """Hold a lease on a version while the block runs, which must take less time than a lease lasts.

    Example: ``async with held(store, f"publisher-{uuid4().hex}", base.hash): ...``
    """
    await hold(store, name, root)
    try:
        yield
    finally:
        await let_go(store, name)


async def _set(store: KeptStore, ref: str, root: str) -> str | None:
    for _ in range(_ATTEMPTS):
        before = await store.read_ref(ref)
        if await store.read_ref(version_ref(root)) is None:
            break
        try:
            await store.move_ref(ref, before, root)
        except Conflict:
            continue
        if await store.read_ref(version_ref(root)) is not None:
            return before
        await _undo(store, ref, before, root)
        break
    else:
        raise Conflict(f"ref {ref} keeps being moved by others; give each holder a different name")
    if ref.startswith(LEASES):
        await let_go(store, ref.removeprefix(LEASES))
    raise NotFound(f"version {root} is not in the weight store (any more); publish it again", field="root")


async def _undo(store: KeptStore, ref: str, before: str | None, root: str) -> None:
    with contextlib.suppress(Conflict):
        if before is None:
            await store.delete_ref(ref, root)
        else:
            await store.move_ref(ref, root, before)
