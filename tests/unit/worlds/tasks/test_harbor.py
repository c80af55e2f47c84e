"""Harbor's folders as tasks and back: what is understood, what is refused by name, and what never happens."""

import os

import pytest
from tests.fakes.harbor import harbor_reads, needs_harbor
from tests.fakes.harbor_folders import save_harbor
from tests.fakes.tasks import WRONG, calc_task

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.tasks.harbor import harbor_task, load_harbor, read_folder
from ostinato.worlds.tasks.task import Grading
from ostinato.worlds.tasks.tasksets import load, save, taskset_of

TOML = """
schema_version = "1.4"
[task]
name = "acme/calc"
[metadata]
category = "repair"
difficulty = "easy"
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 90.0
[environment]
network_mode = "no-network"
memory_mb = 300
[environment.env]
LANG = "C.UTF-8"
"""
DOCKER = "FROM python:3.11-slim\nENV A=1 B='2 3'\nWORKDIR /app\n# comment\nCOPY calc.py lib \\\n  ./\nCMD [\"bash\"]\n"


def folder(path, toml=TOML, docker=DOCKER, **files):
    written = {
        "task.toml": toml,
        "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nMend calc.py.\n",
        "environment/Dockerfile": docker,
        "environment/calc.py": WRONG.decode(),
        "environment/lib/a/b.py": "b = 1\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "true\n",
    } | files
    for name, text in written.items():
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return path


def test_a_folder_gives_its_task(tmp_path):
    task = harbor_task(folder(tmp_path / "calc"))
    assert (task.id, task.family, task.timeout_s, task.grading.timeout_s) == ("acme/calc", "repair", 90.0, 30.0)
    assert task.messages == (Message(role=Role.USER, text="Mend calc.py.\n"),)
    assert task.spec.workdir == "/app"
    assert task.spec.files == {"calc.py": WRONG, "a/b.py": b"b = 1\n"}
    assert task.spec.env == {"A": "1", "B": "2 3", "LANG": "C.UTF-8"}
    assert (task.spec.hosts, task.spec.limits.memory_mb) == ((), 300)
    assert task.grading.hidden["tests/test.sh"].startswith(b"echo 1")
    assert "tests/test.sh" not in task.spec.files


def test_what_was_read_is_written_as_it_was(tmp_path):
    (tmp_path / "set").mkdir()
    source = folder(tmp_path / "set" / "calc")
    taskset = load_harbor(tmp_path / "set")
    save(taskset, tmp_path / "own.jsonl")
    (written,) = save_harbor(load(tmp_path / "own.jsonl"), tmp_path / "out")
    assert read_folder(written) == read_folder(source)
    assert os.access(written / "tests" / "test.sh", os.X_OK)
    with pytest.raises(BadConfig, match="is there already"):
        save_harbor(taskset, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"toml": TOML + "gpus = 1\n"}, "environment.env.gpus must be a string"),
        ({"toml": TOML.replace("memory_mb = 300", "gpus = 1")}, "environment.gpus"),
        ({"toml": TOML.replace("memory_mb = 300", 'memory_mb = "1G"')}, "environment.memory_mb"),
        ({"toml": TOML.replace("memory_mb = 300", 'docker_image = "x"')}, "environment.docker_image"),
        ({"toml": TOML.replace("memory_mb = 300", 'os = "Windows"')}, "environment.os"),
        ({"toml": TOML.replace('network_mode = "no-network"', "")}, "environment.network_mode: 'public'"),
        ({"toml": TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = ["*.x.org"]')}, "allowed_hosts"),
        ({"toml": TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = "x.org"')}, "must be a list"),
        ({"toml": TOML.replace("C.UTF-8", "${HOME}")}, "variables of the host are never read"),
        ({"toml": TOML.replace("timeout_sec = 30.0", 'user = "root"')}, "verifier.user"),
        ({"toml": TOML.replace("timeout_sec = 30.0", "timeout_sec = -1")}, "verifier.timeout_sec"),
        ({"toml": "[[steps]]\nname = 'a'\n" + TOML.replace('schema_version = "1.4"', "")}, "steps is not supported"),
        ({"toml": "colour = 1\n" + TOML}, "unknown key 'colour'"),
        ({"toml": "=" + TOML}, "not TOML"),
        ({"toml": "metadata = 1\n"}, "metadata must be a table"),
        ({"docker": "FROM x\nRUN apt-get install -y git\n"}, "line 2: RUN needs an image"),
        ({"docker": "FROM x\nADD http://x /app\n"}, "line 2: ADD"),
        ({"docker": "FROM x\nWORKDIR /app\nCOPY calc.py /etc/passwd\n"}, "/etc/passwd is outside /app"),
        ({"docker": "FROM x\nWORKDIR /app\nCOPY ../../x .\n"}, "'../../x'"),
        ({"docker": "FROM x\nWORKDIR /app\nCOPY gone .\n"}, "'gone' is not in environment/"),
        ({"docker": "FROM x\nWORKDIR /app\nCOPY $X .\n"}, "without variables"),
        ({"docker": "FROM x\n"}, "environment.workdir"),
        ({"docker": "FROM x \\"}, "middle of an instruction"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path, change, said):
    with pytest.raises(BadConfig, match=r"Harbor task .*calc") as caught:
        harbor_task(folder(tmp_path / "calc", **change))
    assert said in str(caught.value)


def test_layers_stand_for_an_image_and_offline_for_a_public_network(tmp_path):
    (tmp_path / "layer").mkdir()
    docker = DOCKER.replace("# comment", "RUN make")
    toml = TOML.replace('network_mode = "no-network"', 'docker_image = "x"')
    task = harbor_task(folder(tmp_path / "calc", toml, docker), layers=(str(tmp_path / "layer"),), offline=True)
    assert (task.spec.layers, task.spec.hosts) == ((str(tmp_path / "layer"),), ())


def test_hosts_are_reached_by_both_ports(tmp_path):
    toml = TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = ["pypi.org"]')
    assert harbor_task(folder(tmp_path / "calc", toml)).spec.hosts == ("pypi.org:443", "pypi.org:80")


@pytest.mark.parametrize("name", ["tests/secret", "environment/out", "task.toml"])
def test_a_link_in_a_folder_is_refused(tmp_path, name):
    place = folder(tmp_path / "calc") / name
    place.unlink(missing_ok=True)
    place.symlink_to("/etc/passwd")
    with pytest.raises(BadConfig, match="link"):
        harbor_task(tmp_path / "calc")


def test_a_folder_without_a_task_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="no Harbor task"):
        load_harbor(tmp_path)
    (folder(tmp_path / "calc") / "tests" / "test.sh").unlink()
    with pytest.raises(BadConfig, match=r"tests/test\.sh is missing"):
        load_harbor(tmp_path)


OWN = [
    calc_task(family='a "b" \\ 漢 \x7f 😀', stop=("\n\n",), about={"n": "1"}),
    calc_task(id="b/../c", spec=SandboxSpec(files={"d/x": b"\xff"}, hosts=("pypi.org:443",), env={"A": "'1\" "})),
]


def test_our_own_task_comes_back(tmp_path):
    save_harbor(taskset_of("own", OWN), tmp_path / "out")
    assert list(load_harbor(tmp_path / "out").tasks) == OWN


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grading": Grading(grader="function")}, "'function' is no script"),
        ({"grading": Grading(grader="pytest")}, "names no tests"),
        ({"grading": Grading(grader="x", data={"harbor": 1})}, "grading.data.harbor"),
        (
            {
                "grading": Grading(
                    grader="x", data={"harbor": {"task.toml": "", "instruction.md": ""}}, hidden={"../x": b""}
                )
            },
            "'../x'",
        ),
    ],
)
def test_a_task_that_harbor_could_not_run_is_refused_before_anything_is_written(tmp_path, changes, said):
    tasks = [calc_task(id="ok"), calc_task(**changes)]
    with pytest.raises(BadConfig) as caught:
        save_harbor(taskset_of("own", tasks), tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_forged_row_names_no_layers(tmp_path):
    (written,) = save_harbor(taskset_of("own", [calc_task()]), tmp_path / "out")
    config = (written / "task.toml").read_text()
    assert r"{\"id\"" in config
    forged = config.replace(r"\"family\"", r"\"world\": {\"layers\": [\"etc\"]}, \"family\"")
    (written / "task.toml").write_text(forged)
    with pytest.raises(BadConfig, match="layers"):
        harbor_task(written)


@needs_harbor
def test_harbor_takes_what_is_written(tmp_path):
    folders = save_harbor(taskset_of("own", OWN), tmp_path / "out")
    source = folder(tmp_path / "calc")
    (again,) = save_harbor(taskset_of("x", [harbor_task(source)]), tmp_path / "again")
    one, two, theirs, back = harbor_reads(*folders, source, again)
    assert theirs == back
    assert (one["name"], one["instruction"]) == ("ostinato/calc-1", "Mend calc.py: add must add.")
    assert one["config"]["environment"]["network_mode"] == "no-network"
    assert two["config"]["environment"]["allowed_hosts"] == ["pypi.org"]
    assert two["config"]["environment"]["env"] == {"A": "'1\" "}
    assert one["config"]["metadata"]["category"] == OWN[0].family
