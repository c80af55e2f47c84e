"""A backend whose sandboxes last for one program: each run of `SingleRuns` gets all files anew. For what needs no state between calls."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.core.sandboxing import Isolation, SandboxSpec
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns

WORKDIR = "/tmp"


class OneShot:
    def __init__(self, memory_mb=4096, disk_mb=512):
        self.runs = SingleRuns(
            SandboxConfig(memory_mb=memory_mb, disk_mb=disk_mb, processes=64, open_files=256, output_bytes=64 << 20)
        )

    async def isolation(self):
        return Isolation(kind="namespaces", forks=False, counts_memory=False)

    async def start(self, spec: SandboxSpec):
        files = {}
        for layer in spec.layers:
            for path in Path(layer).rglob("*"):
                if path.is_file():
                    files[str(path.relative_to(layer))] = path.read_bytes()
        return OneShotSandbox(self.runs, {**files, **spec.files})

    async def close(self):
        self.runs.close()


class OneShotSandbox:
    def __init__(self, runs, files):
        self.runs, self.files = runs, files

    async def exec(self, argv: Sequence[str], *, stdin=b"", cwd=None, env: Mapping[str, str] | None = None, timeout):
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        return await self.runs.run(["/usr/bin/env", *variables, *argv], files=self.files, stdin=stdin, timeout=timeout)

    async def stop(self):
        self.files = {}
