"""vLLM for tests and benchmarks: `FakeVllm`, its control plane without a model, and `VllmServer`, a real server process."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import signal
import socket
import subprocess
import tomllib
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ostinato.model.load import resolve
from ostinato.weights.follow.staging import Staging

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("OSTINATO_PEERS", ROOT / ".peers")) / "vllm" / "bin" / "python"
ENGINE_OPTIONS = (
    *("--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
    *("--structured-outputs-config", '{"backend": "guidance"}'),
)
"""What a server behind the engine needs, on a CPU."""


def usable() -> bool:
    """True if vLLM's environment is there: `python -m benchmarks.peers vllm`."""
    wanted = (
        "import importlib.util as u; exit(not all(map(u.find_spec, 'vllm blake3 numba obstore zstandard'.split())))"
    )
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", wanted], check=False).returncode == 0


class FakeVllm:
    """A vLLM server's control plane with `workers` workers. It refuses the same requests in the same states as vLLM.

    `fail` maps a path to the error message of its next call. `calls` lists the paths in order. `down`: every call is answered with 503.

    Example::

        fake = FakeVllm(Staging(store))
        async with serving(fake.app) as url: ...
    """

    def __init__(self, staging: Staging, workers: int = 1) -> None:
        self.staging, self.served = staging, [""] * workers
        self.label, self.paused, self.active, self.broken = "default", False, False, ""
        self.fail: dict[str, str] = {}
        self.down = False
        self.calls: list[str] = []
        self.app = Starlette(routes=[Route("/{name}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if self.down:
            return JSONResponse({"error": {"message": "down"}}, status_code=503)
        self.calls.append(name)
        body: dict[str, Any] = await request.json() if await request.body() else {}
        try:
            if name in self.fail:
                raise RuntimeError(self.fail.pop(name))
            if not hasattr(self, f"_{name}"):
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            return JSONResponse(await asyncio.to_thread(getattr(self, f"_{name}"), body))
        except Exception as error:  # noqa: BLE001 (so does the server)
            return JSONResponse(
                {"error": {"message": f"Call to collective_rpc method failed: {error}"}}, status_code=500
            )

    def _init_weight_transfer_engine(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"message": str(body["init_info"]["url"])}

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = True
        return {"status": "paused"}

    def _resume(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = False
        return {"status": "resumed"}

    def _is_paused(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"is_paused": self.paused}

    def _start_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active = True
        return {}

    def _update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        root = body["update_info"]["root"]
        self.staging.take(root)
        self.served = [root] * len(self.served)
        return {}

    def _finish_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active, self.label = False, body["weight_version"]
        return {}

    def _health(self, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _weight_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"weight_version": self.label}

    def _reset_prefix_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    def _collective_rpc(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["method"] == "ostinato_stage":
            self.staging.stage(*body["args"])
        staged = self.staging.status()
        about = {"root": staged.root, "state": staged.state, "error": staged.error, "seconds": staged.seconds}
        return {"results": [{**about, "served": root, "broken": self.broken} for root in self.served]}


class VllmServer:
    """A vLLM API server on a free loopback port, in the environment of `python`, with this checkout's plug-in. A context manager.

    `source` is the checkout: its `src` goes onto the server's path, and its entry points are found without an installation.

    `extension` is the worker extension, `StagingWorker` or a subclass of it, and `path` holds the folders of the subclass's module.
    `environment` adds to the process's environment variables, or replaces them.

    Example::

        with VllmServer(python, Path("model"), source=ROOT, work=tmp_path, log=tmp_path / "vllm.log") as server:
            await server.ready()
            await client.get(server.url + "/v1/models")
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        source: Path,
        work: Path,
        log: Path,
        options: Sequence[str] = (),
        extension: str = "ostinato.weights.follow.vllm.worker.StagingWorker",
        path: Sequence[Path] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        niceness: int = 0,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = log
        self._command = [  # not `vllm serve`: that command cannot find its own version under the CPU wheel's name
            *("nice", "-n", str(niceness)),
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--dtype", "bfloat16", "--max-model-len", "2048"),
            *(
                "--weight-transfer-config",
                '{"backend": "ostinato"}',
                "--max-num-seqs",
                "16",
                "--served-model-name",
                "model",
            ),
            *("--worker-extension-cls", extension, *options),
        ]
        self._environment = os.environ | _environment(python, source, work, path) | dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        for number, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process.wait()

    async def ready(self, timeout_s: float = 600.0) -> None:
        """Wait until the server answers. Raises RuntimeError with the end of its log if it ended, TimeoutError if it took too long."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(self._healthy):
                if self._process.poll() is not None:
                    tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
                    raise RuntimeError(
                        f"vLLM ended with status {self._process.returncode}; the end of {self._log}:\n{tail}"
                    )
                await asyncio.sleep(1.0)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


def _environment(python: Path, source: Path, work: Path, path: Sequence[Path]) -> dict[str, str]:
    """The settings that vLLM's CPU guide asks for, and the path on which it finds this checkout and its entry points."""
    told = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    place = work / "entry-points" / "ostinato-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: ostinato\nVersion: 0\n")
    lines = [
        line
        for group, entries in told["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")
    wanted = [str(python.parent.parent / "lib" / "libiomp5.so"), "/usr/lib/*/libtcmalloc_minimal.so.4"]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, [source / "src", place.parent, *path])),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2]),
        "LD_PRELOAD": ":".join(found for pattern in wanted for found in sorted(glob.glob(pattern))[:1]),
    }


@contextlib.contextmanager
def serving_smollm2(count: int, work: Path, batch: int = 64) -> Generator[list[str]]:
    """Start `count` real servers of SmolLM2 for the engine to load weights into. Yields their URLs.

    Each has one thread and gives way to the trainer. They compute in bf16 if this CPU has instructions for it, else in fp32, and take 3 to
    4 GB each.
    """
    model = resolve("smollm2", Path("~/.cache/ostinato").expanduser())
    flags = torch.cpu.get_capabilities()
    dtype = "bfloat16" if any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"
    options = [*ENGINE_OPTIONS, "--dtype", dtype, "--max-num-seqs", str(batch)]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        servers: list[VllmServer] = []
        for number in range(count):
            log = work / f"vllm-{number}.log"
            server = VllmServer(
                PYTHON, model, source=ROOT, work=work, log=log, options=options, environment=environment, niceness=5
            )
            servers.append(stack.enter_context(server))
        for server in servers:
            asyncio.run(server.ready(1800))
        yield [server.url for server in servers]
