"""Sandboxes over `SingleRuns`: one program each, which starts from the files that were written so far. Isolated, and forgets everything."""

from dataclasses import dataclass
from pathlib import Path

from ostinato.core.errors import Unavailable
from ostinato.core.sandboxing import Isolation
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns, python_inside


class OnceSandbox:
    def __init__(self, runs, spec):
        self.runs, self.spec, self.files, self.gone = runs, spec, {}, False
        for layer in spec.layers:
            root = Path(layer)
            self.files |= {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.files |= dict(spec.files)

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        if self.gone:
            raise Unavailable("the sandbox was stopped")
        settings = [f"{name}={value}" for name, value in {**self.spec.env, **(env or {})}.items()]
        return await self.runs.run(["/usr/bin/env", *settings, *argv], files=self.files, stdin=stdin, timeout=timeout)

    async def write(self, path, data):
        self.files[path] = data

    async def stop(self):
        self.gone = True


@dataclass
class OnceBackend:
    runs: SingleRuns
    started: int = 0

    async def isolation(self):
        return Isolation(kind="namespaces", forks=False, counts_memory=False)

    async def start(self, spec):
        self.started += 1
        return OnceSandbox(self.runs, spec)

    async def close(self):
        self.runs.close()


def once_backend(**limits):
    limits = {"disk_mb": 64, "output_bytes": 8 << 20, "memory_mb": 512} | limits
    return OnceBackend(SingleRuns(SandboxConfig(**limits)))


PYTHON = python_inside()
