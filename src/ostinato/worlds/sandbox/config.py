"""Configuration of sandboxes: the `[sandbox]` section."""

from typing import Literal

from pydantic import BaseModel, Field


class SandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """The sandbox backend, the resource limits of one run, and the limits on concurrent runs and sandboxes."""

    backend: Literal["namespaces", "gvisor", "e2b"] = Field(
        default="namespaces",
        description="What isolates the code of simulated worlds from this machine: Linux namespaces; gVisor, which has its own kernel "
        "(it needs runsc and is slower); or E2B, virtual machines elsewhere (it needs ostinato[e2b] and a key in the variable "
        "E2B_API_KEY). Suites of single answers, the demo's code and `ostinato worlds build` always run in namespaces.",
    )
    template: str = Field(
        default="base",
        min_length=1,
        description="With backend = 'e2b': the E2B template from which sandboxes start. It needs bash, python3 (3.10 or newer) and "
        "whatever the tasks run.",
    )
    concurrency: int = Field(default=2, ge=1, le=256, description="Runs at the same time. Further runs wait.")
    memory_mb: int = Field(
        default=256, ge=32, description="Memory of a run, and address space of each of its processes, in MiB."
    )
    disk_mb: int = Field(default=16, ge=1, description="Size of the run's /tmp and of any file in it, in MiB.")
    processes: int = Field(
        default=16, ge=4, description="Most processes and threads of a run, including the sandbox's own."
    )
    open_files: int = Field(default=64, ge=8, le=1024, description="Most open files per process of a run.")
    output_bytes: int = Field(
        default=65536, ge=1, description="Bytes of stdout or of stderr above which a run is ended."
    )
    boxes: int = Field(
        default=256,
        ge=1,
        le=4000,
        description="Stateful sandboxes that may be open at once. Further ones wait.",
    )
