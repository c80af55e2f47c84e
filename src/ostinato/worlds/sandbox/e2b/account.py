"""Client for E2B's official SDK (an optional dependency): creates machines and maps SDK errors to ours, without the API key in them."""

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
    """Creates machines from one template with one API key. Raises BadConfig if the SDK or the key is missing."""

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
        """Create a machine without network access. On cancellation, wait for the server and kill the machine that it created.

        Raises BadConfig if the key or the template is refused, Unavailable.
        """
        creating = asyncio.create_task(self._create())
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.shield(_kill_created(creating))
            raise

    async def _create(self) -> Machine:
        with self.mapped_errors("start a sandbox"):
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
    def mapped_errors(self, doing: str) -> Generator[None]:
        """Map any SDK error to one of ours that keeps its message without the API key. `doing` names the attempted action in the message.

        The SDK turns some cancellations into its own errors or swallows them: they are re-raised here.
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
        except Exception as error:  # noqa: BLE001 - a malformed answer can make the SDK raise anything
            check()
            raise self._map_error(error, doing) from None  # its text may contain the key
        check()

    def _map_error(self, error: Exception, doing: str) -> OstinatoError:
        sdk = self._sdk
        cause = f"{type(error).__name__}: {error}".replace(self._key, "***")[:600]
        message = f"E2B could not {doing} ({cause})"
        status = getattr(error, "status_code", None)
        if isinstance(error, sdk.AuthenticationException):
            return BadConfig(f"{message}: set {KEY} to a key that this server knows")
        if isinstance(error, sdk.RateLimitException):
            return Unavailable(f"{message}: lower sandbox.boxes, or wait")
        if doing == "start a sandbox" and (status in (400, 403, 404) or isinstance(error, sdk.TemplateException)):
            return BadConfig(f"{message}: is there a template sandbox.template = {self._template!r}?")
        if isinstance(error, (sdk.NotFoundException, sdk.SandboxNotRunningException)):
            return MachineGone(f"the sandbox is gone: {message}")
        return Unavailable(message)


class Machine:
    """One virtual machine. All calls raise Unavailable, MachineGone if the machine is known to be gone, or BadConfig for a refused key."""

    def __init__(self, account: Account, sandbox: AsyncSandbox) -> None:
        self._account, self._sandbox = account, sandbox
        self._pid = 0

    @property
    def name(self) -> str:
        """The machine's id at E2B."""
        return self._sandbox.sandbox_id

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file as root, creating its parent directories."""
        with self._account.mapped_errors("take a file"):
            await self._sandbox.files.write(path, data, user="root", request_timeout=_UPLOAD_S, use_octet_stream=True)

    async def run(
        self, command: str, on_stdout: Callable[[str], None], on_stderr: Callable[[str], None]
    ) -> HelperOutput:
        """Start the helper command as root. Its stdout goes to `on_stdout`, its stderr to `on_stderr`."""
        with self._account.mapped_errors("run the sandbox's helper"):
            handle = await self._sandbox.commands.run(
                command, background=True, user="root", cwd="/", stdin=True, timeout=0, retain_output=False,
                on_stdout=on_stdout, on_stderr=on_stderr,
            )  # fmt: skip
        self._pid = handle.pid
        return HelperOutput(self._account, handle)

    async def follow(self, on_stdout: Callable[[str], None], on_stderr: Callable[[str], None]) -> HelperOutput:
        """Reconnect to the helper's output after the connection broke. Output in the meantime is lost."""
        with self._account.mapped_errors("reach the sandbox's helper"):
            handle = await self._sandbox.commands.connect(
                self._pid, timeout=0, retain_output=False, on_stdout=on_stdout, on_stderr=on_stderr
            )
        return HelperOutput(self._account, handle)

    async def send(self, data: bytes) -> None:
        """Send bytes to the helper's stdin, all or nothing: after an error, either all of them have arrived or none."""
        with self._account.mapped_errors("reach the sandbox's helper"):
            await self._sandbox.commands.send_stdin(self._pid, data, request_timeout=_REQUEST_S)

    async def keep(self) -> None:
        """Send a keep-alive: extend the machine's life to `LIFE_S` seconds from now."""
        with self._account.mapped_errors("keep the sandbox"):
            await self._sandbox.set_timeout(LIFE_S, request_timeout=_REQUEST_S)

    async def kill(self) -> None:
        """Kill the machine. If this fails, it expires by itself within `LIFE_S`."""
        with self._account.mapped_errors("end the sandbox"):
            await self._sandbox.kill(request_timeout=_REQUEST_S)


class HelperOutput:
    """A connection to the output of the helper command."""

    def __init__(self, account: Account, handle: AsyncCommandHandle[Any]) -> None:
        self._account, self._handle = account, handle

    async def ended(self) -> int:
        """Wait for the helper's exit code. Raises Unavailable if the connection broke; the helper may still be running then."""
        from e2b import CommandExitException

        with self._account.mapped_errors("listen to the sandbox's helper"):
            try:
                return (await self._handle.wait()).exit_code
            except CommandExitException as ended:
                return ended.exit_code

    async def leave(self) -> None:
        """Disconnect. The helper keeps running."""
        with contextlib.suppress(Exception):
            await self._handle.disconnect()


async def _kill_created(creating: asyncio.Task[Machine]) -> None:
    """Kill the machine once it is created. If that fails, it expires by itself."""
    with contextlib.suppress(OstinatoError):
        await (await creating).kill()
