"""Which build of torch an installation takes, and what it says before it downloads it."""

import os
import socketserver
import subprocess
import sys
import threading
import zipfile

import pytest
from deploy import install_torch as install

CPU = "https://download.pytorch.org/whl/cpu"
CUDA = ["nvidia-cublas==13.1.1.3", "triton==3.7.1; platform_system == 'Linux'", "sympy"]


@pytest.mark.parametrize(
    ("build", "gpu", "index"),
    [
        ("auto", False, CPU),
        ("auto", True, None),
        ("cpu", True, CPU),
        ("cuda", False, None),
        ("cu129", False, "https://download.pytorch.org/whl/cu129"),
        ("https://mirror.example/torch", True, "https://mirror.example/torch"),
    ],
)
def test_without_a_gpu_the_cpus_build_is_wanted_and_a_person_may_choose(build, gpu, index):
    assert install.index_of(build, gpu) == index


def one(version, url, requires=()):
    return {"metadata": {"version": version, "requires_dist": list(requires)}, "download_info": {"url": url}}


def test_what_is_downloaded_is_said_with_its_index_and_size():
    told = install.sentence(one("2.13.0+cpu", f"{CPU}/torch-2.13.0.whl", ["sympy"]), CPU, 191_794_682)
    assert told == "torch 2.13.0+cpu, from download.pytorch.org: 192 MB"
    assert install.sentence(one("2.13.0", "file:///wheels/torch-2.13.0.whl"), CPU, None) == (
        "torch 2.13.0, on disk, in /wheels: size unknown"
    )


def test_gigabytes_are_announced_with_the_way_round_them(monkeypatch):
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    build = one("2.13.0", "https://files.pythonhosted.org/torch-2.13.0.whl", CUDA)
    assert "make install TORCH_BUILD=cpu" in install.sentence(build, None, 1)
    unreached = install.sentence(build, CPU, 1)
    assert f"GB more. {CPU} has no such torch or cannot be reached" in unreached
    elsewhere = one("2.13.0", "https://files.pythonhosted.org/t.whl", ["nvidia-cublas; platform_system == 'Plan9'"])
    assert "GB" not in install.sentence(elsewhere, None, 1)


def test_an_index_is_asked_again_unless_it_was_passed_over():
    file, elsewhere = "file:///wheels/torch.whl", "https://download-r2.pytorch.org/whl/torch.whl"
    assert install.passed_over(CPU, one("2.13.0+cpu", file))
    assert install.passed_over(CPU, one("2.13.0", "https://files.pythonhosted.org/torch.whl"))
    assert not install.passed_over(CPU, one("2.13.0+cpu", elsewhere))
    assert not install.passed_over("https://mirror.example/torch", one("2.13.0", "https://mirror.example/torch.whl"))


class _Mute(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.recv(4096)
        self.request.sendall(b"not HTTP\r\n\r\n")


def test_a_server_that_answers_nonsense_only_costs_the_size():
    with socketserver.TCPServer(("127.0.0.1", 0), _Mute) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert install.size(f"http://127.0.0.1:{server.server_address[1]}/torch.whl") is None


def test_a_driver_s_tool_that_never_answers_is_no_gpu(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(install, "_TOOL_S", 0.01)
    monkeypatch.setattr(install, "Path", lambda _: tmp_path / "no driver")
    assert not install.has_gpu()


@pytest.mark.parametrize("report", ["not JSON", "[]", "{}", '{"install": [{"metadata": {}}]}'])
def test_a_report_of_pip_that_cannot_be_read_only_costs_the_announcement(report, monkeypatch, capsys):
    codes = []

    def run(command, **_):
        codes.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=report)

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["install_torch.py", "--build", "cpu", "torch"])
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as ended:
        install.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torch, from {CPU}: size unknown\n"
    assert "--dry-run" not in codes[-1]


@pytest.fixture
def index(tmp_path):
    """An index on disk with a torch of two builds, as torch's own and PyPI together have them."""
    folder = tmp_path / "simple" / "torch"
    folder.mkdir(parents=True)
    names = []
    for version in ("9.1.0", "9.1.0+cpu"):
        names.append(f"torch-{version}-py3-none-any.whl")
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(folder / names[-1], "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    return (tmp_path / "simple").as_uri()


def test_a_builds_own_version_wins_over_the_plain_one(index, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    found = install.found("torch==9.1.0", index, ["--ignore-installed", "--index-url", index])
    assert found["metadata"]["version"] == "9.1.0+cpu"
    told = install.sentence(found, index, install.size(found["download_info"]["url"]))
    assert told.startswith("torch 9.1.0+cpu, on disk, in ")
    assert told.endswith(": 0 MB")


def test_what_is_there_already_is_not_announced():
    done = subprocess.run(
        [sys.executable, install.__file__, "pip"], capture_output=True, text=True, check=True, env={"PIP_NO_INDEX": "1"}
    )
    assert done.stdout == ""
