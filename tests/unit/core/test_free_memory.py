"""Which limit on memory is the smallest, in machines as their kernels show them."""

import resource
import subprocess
import sys

import pytest

from ostinato.core.memory import GIB, address_space_limited, free_memory, in_gib, is_short, process_limit


@pytest.fixture
def kernel(tmp_path):
    """Writes the kernel's files of a machine and returns the directory that holds them."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_max", ".max").replace("_current", ".current").replace(
                "_stat", ".stat"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_a_machine_without_limits(kernel):
    room = free_memory(kernel(proc__meminfo="MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n"))
    assert (room.size, room.bound) == (4 * GIB, "what the machine has available")


def test_nothing_is_said_where_the_kernel_says_nothing(tmp_path):
    assert free_memory(tmp_path) is None


def test_a_container_of_the_second_kind_counts_its_caches_as_free(kernel):
    root = kernel(
        proc__meminfo="MemAvailable: 16777216 kB\n",
        proc__self__cgroup="0::/box\n",
        sys__fs__cgroup__memory_max="max\n",
        sys__fs__cgroup__memory_current="9\n",
        sys__fs__cgroup__box__memory_max=f"{3 * GIB}\n",
        sys__fs__cgroup__box__memory_current=f"{2 * GIB}\n",
        sys__fs__cgroup__box__memory_stat=f"anon 5\ninactive_file {GIB}\n",
    )
    assert free_memory(root).size == 2 * GIB
    assert "control group's limit of 3.0 GiB" in free_memory(root).bound
    assert process_limit(root).size == 3 * GIB


def test_a_limit_above_the_container_counts_too(kernel):
    root = kernel(
        proc__self__cgroup="0::/pod/box\n",
        sys__fs__cgroup__pod__memory_max=f"{GIB}\n",
        sys__fs__cgroup__pod__memory_current="0\n",
        sys__fs__cgroup__pod__box__memory_max=f"{2 * GIB}\n",
        sys__fs__cgroup__pod__box__memory_current="0\n",
    )
    assert free_memory(root).size == GIB


def test_a_container_of_the_first_kind(tmp_path):
    group = tmp_path / "sys/fs/cgroup/memory/docker/1"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n")
    (group / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (group.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group.parent / "memory.usage_in_bytes").write_text("0\n")
    assert free_memory(tmp_path).size == GIB


def test_the_address_space_that_a_shell_leaves():
    text = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
        "from ostinato.core.memory import address_space_limited, process_limit; room = process_limit();"
        "print(room.size, address_space_limited(), room.bound)"
    )
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split(
        None, 2
    )
    assert 0 < int(said[0]) <= 2 * GIB, "what the process has taken already is taken off"
    assert said[1] == "True"
    assert said[2] == "the address space limit (ulimit -v) of 2.0 GiB per process\n" or int(said[0]) < GIB
    assert address_space_limited() == (resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 MiB"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_mean_a_lack_of_memory(error, short):
    assert is_short(error) is short


def test_sizes_for_people():
    assert (in_gib(3 << 29), in_gib(1 << 20)) == ("1.5 GiB", "1 MiB")
