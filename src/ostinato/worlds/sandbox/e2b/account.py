"""Requests machines through E2B's official SDK, if installed, and translates its errors into ours. None of them contains the key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from ostinato.core.errors import BadConfig, OstinatoError, Unavailable

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

KEY = "E2B_API_KEY"
LIFE_S = 300  # a machine ends after this long without a keep-alive from us
_REQUEST_S = 60.0
_UPLOAD_S = 600.0
_INSTALL = "sandbox.backend = \"e2b\" needs E2B's SDK, which is not installed: pip install 'ostinato[e2b]'"
_NO_KEY = (
    f'sandbox.backend = "e2b" takes its key from the variable {KEY}, which is not set (a server of your own: also E2B_DOMAIN, or '
    "E2B_API_URL and E2B_SANDBOX_URL)"
)


class MachineGone(Unavailable):
    """The machine no longer exists, or never did, so nothing that ran in it can be reached again."""


class Account:
    """Requests machines of one template with one key. Raises BadConfig without the SDK or the key."""

    def __init__(self, template: str, environment: Mapping[str, str] = os.environ) -> None:
        try:
            import e2b
        except ImportError:
            raise BadConfig(_INSTALL) from None
        self._sdk = e2b
        self._template = template
        self._key = environment.get(KEY, "").strip()
        if not self._key:
            raise BadConfig(_NO_KEY)

    async def machine(self) -> Machine:
        """Create a machine without a network. Cancelled, it first ends the machine that the server may have made by then.

        Raises BadConfig if the key or the template is refused, Unavailable.
        """
        creating = asyncio.create_task(self._create())
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.shield(_undone(creating))
            raise

    async def _create(self) -> Machine:
        with self.explained("start a sandbox"):
            sandbox = await self._sdk.AsyncSandbox.create(
                template=self._template,
                timeout=LIFE_S,
                allow_internet_access=False,
                metadata={"made_by": "ostinato"},
                idempotency_key=str(uuid.uuid4()),  # a retry after a lost answer gets the same machine
                api_key=self._key,
                request_timeout=_REQUEST_S,
                debug=False,
            )
            return Machine(self, sandbox)

    @contextlib.contextmanager
    def explained(self, doing: str) -> Generator[None]:
        """Turn any error of the SDK into one of ours that keeps its message, except for the key.

        The SDK answers some cancellations with an error of its own, or with a result: here they are raised after all.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task else 0

        def check() -> None:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError from None

        try:
            yield
        except OstinatoError:
            raise
        except Exception as error:  # noqa: BLE001 - a server that answers nonsense makes the SDK raise anything
            check()
            raise self._ours(error, doing) from None  # its own text may hold the key
        check()

    def _ours(self, error: Exception, doing: str) -> OstinatoError:
        sdk = self._sdk
        said = f"{type(error).__name__}: {error}".replace(self._key, "***")[:600]
        told = f"E2B could not {doing} ({said})"
        status = getattr(error, "status_code", None)
        if isinstance(error, sdk.AuthenticationException):
            return BadConfig(f"{told}: set {KEY} to a key that this server knows")
        if isinstance(error, sdk.RateLimitException):
            return Unavailable(f"{told}: lower sandbox.boxes, or wait")
        if doing == "start a sandbox" and (status in (400, 403, 404) or isinstance(error, sdk.TemplateException)):
            return BadConfig(f"{told}: is there a template sandbox.template = {self._template!r}?")
        if isinstance(error, (sdk.NotFoundException, sdk.SandboxNotRunningException)):
            return MachineGone(f"the sandbox is gone: {told}")
        return Unavailable(told)


class Machine:
    """One virtual machine. All calls raise Unavailable, MachineGone if it is known to be gone, or BadConfig if the key is refused."""

    def __init__(self, account: Account, sandbox: AsyncSandbox) -> None:
        self._account, self._sandbox = account, sandbox
        self._pid = 0

    @property
    def name(self) -> str:
        """The machine's id at E2B."""
        return self._sandbox.sandbox_id

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file as root, and make its parent directories."""
        with self._account.explained("take a file"):
            await self._sandbox.files.write(path, data, user="root", request_timeout=_UPLOAD_S, use_octet_stream=True)

    async def run(self, command: str, heard: Callable[[str], None], complained: Callable[[str], None]) -> Following:
        """Start the helper command as root. Its output goes to `heard`, its error output to `complained`."""
        with self._account.explained("run the sandbox's helper"):
            handle = await self._sandbox.commands.run(
                command, background=True, user="root", cwd="/", stdin=True, timeout=0, retain_output=False,
                on_stdout=heard, on_stderr=complained,
            )  # fmt: skip
        self._pid = handle.pid
        return Following(self._account, handle)

    async def follow(self, heard: Callable[[str], None], complained: Callable[[str], None]) -> Following:
        """Listen to the helper again after the connection broke. Its output in the meantime is lost."""
        with self._account.explained("reach the sandbox's helper"):
            handle = await self._sandbox.commands.connect(
                self._pid, timeout=0, retain_output=False, on_stdout=heard, on_stderr=complained
            )
        return Following(self._account, handle)

    async def send(self, data: bytes) -> None:
        """Send bytes to the helper's standard input. After an error, either all of them have arrived or none."""
        with self._account.explained("reach the sandbox's helper"):
            await self._sandbox.commands.send_stdin(self._pid, data, request_timeout=_REQUEST_S)

    async def keep(self) -> None:
        """Extend the machine's life to `LIFE_S` seconds from now."""
        with self._account.explained("keep the sandbox"):
            await self._sandbox.set_timeout(LIFE_S, request_timeout=_REQUEST_S)

    async def kill(self) -> None:
        """End the machine. If this fails, it ends by itself later."""
        with self._account.explained("end the sandbox"):
            await self._sandbox.kill(request_timeout=_REQUEST_S)


class Following:
    """The helper command, while we are connected to its output."""

    def __init__(self, account: Account, handle: AsyncCommandHandle[Any]) -> None:
        self._account, self._handle = account, handle

    async def ended(self) -> int:
        """Wait for the helper's exit code. Raises Unavailable if the connection broke, when the helper may still be running."""
        from e2b import CommandExitException

        with self._account.explained("listen to the sandbox's helper"):
            try:
                return (await self._handle.wait()).exit_code
            except CommandExitException as ended:
                return ended.exit_code

    async def leave(self) -> None:
        """Stop listening."""
        with contextlib.suppress(Exception):
            await self._handle.disconnect()


async def _undone(creating: asyncio.Task[Machine]) -> None:
    """End the machine once it is made. It ends by itself later if that fails."""
    with contextlib.suppress(OstinatoError):
        await (await creating).kill()
