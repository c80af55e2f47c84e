"""What `ostinato up` refuses before any worker is started, and what it leaves to the nodes of a cluster."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from ostinato.app.storage import Home
from ostinato.app.worlds import function_tasks
from ostinato.config import load
from ostinato.config import save as save_config
from ostinato.core.errors import BadConfig, SandboxRefused
from ostinato.launch.commands import checks, demo, doctor
from ostinato.launch.commands.checks import check_model, check_same_model, check_start, network_warning
from ostinato.launch.commands.demo import check_emptied, choose, empty
from ostinato.launch.commands.up import up
from ostinato.launch.commands.worlds.train import train_in_world
from ostinato.testing.tiny import tiny_model
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns
from ostinato.worlds.sandbox.protocol import refusal
from ostinato.worlds.tasks.tasksets import save

URL = "record.url='postgresql://ann@db/loop?sslmode=verify-full'"


@pytest.fixture
def settings(tmp_path):
    """The settings of a run on the tiny model, with more of them."""
    model = tiny_model(tmp_path / "model")
    return lambda *more: load(None, [f"model.source='{model}'", f"run.directory='{tmp_path / 'run'}'", *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["record.url=mysql://db/loop"], "record.url is not a Postgres URL"),
        (["record.url='postgresql://ann:secret@db/loop'"], "record.url holds a password"),
        ([URL, "record.password_env=OSTINATO_UNSET"], "OSTINATO_UNSET, which is not set: export it"),
        ([URL, "record.encrypt=user"], "record.encrypt is not available for a log in Postgres"),
    ],
)
async def test_settings_of_a_log_in_postgres_are_looked_at_first(settings, more, message):
    pytest.importorskip("psycopg")
    with pytest.raises(BadConfig, match=message):
        await check_start(settings(*more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["serve.api_keys=['acme:short']"], r"serve.api_keys\[0\] is too weak"),
        (["serve.user_keys=['short']"], r"serve.user_keys\[0\] is too weak"),
        (["serve.admin_key=short"], "serve.admin_key is too weak"),
        (["serve.metrics_key=short"], "serve.metrics_key is too weak"),
        (["serve.tenant_quotas={defalt={burst=1}}"], "did you mean 'default'"),
    ],
)
async def test_keys_that_the_gateway_would_refuse_are_refused_before_it_loads_a_model(settings, more, message):
    with pytest.raises(BadConfig, match=message):
        await check_start(settings(*more))


async def test_so_is_a_weak_key_in_a_file(settings, tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("# one a line\nacme:short\n")
    with pytest.raises(BadConfig, match=r"serve\.api_keys_file, key 1 is too weak"):
        await check_start(settings(f"serve.api_keys_file='{file}'"))


@pytest.mark.parametrize("field", ["run.directory", "model.cache"])
async def test_a_place_that_the_locale_cannot_express_is_refused_with_the_way_out(
    settings, tmp_path, monkeypatch, field
):
    here = os.fsencode(tmp_path) + b"/\xfc"  # ü, and no UTF-8
    os.mkdir(here)
    monkeypatch.chdir(here)
    with pytest.raises(BadConfig, match=rf"{field} .*locale; set PYTHONUTF8=1") as refusal:
        await check_start(settings(f"{field}='below'"))
    assert "\n" not in str(refusal.value)


def test_the_doctor_speaks_ascii_where_the_terminal_does(settings, monkeypatch):
    def away(_):
        raise BadConfig("no port")

    monkeypatch.setattr(doctor, "CHECKS", (("python", lambda _: "3.11"), ("port", away)))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert not doctor.examine(settings(), Console(file=out))
    out.flush()
    assert out.buffer.getvalue().startswith(b"ok python   3.11\nno port     no port\n")


async def test_a_server_is_not_asked(settings):
    pytest.importorskip("psycopg")
    await check_start(settings(URL))


async def test_what_another_node_has_is_not_looked_for_on_the_machine_of_up(settings):
    elsewhere = settings(URL, "record.password_env=OSTINATO_UNSET", "model.device='cuda:99'", "model.numerics=fast")
    with pytest.raises(BadConfig, match="cuda:99"):
        await check_start(elsewhere)
    await check_start(elsewhere, on_ray=True)


@pytest.mark.parametrize("check", [check_start, None])
async def test_a_tokenizer_with_more_ids_than_the_model_is_named_with_both_numbers(settings, tmp_path, check):
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 200}))
    with pytest.raises(
        BadConfig, match=r"ids up to 259, and the model has rows for 200 \(0 to 199\).*own tokenizer"
    ) as refusal:
        await check(settings()) if check else check_model(settings())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("sign", ["weights/refs/live", "serve.jsonl"])
def test_another_model_is_refused_by_a_run_that_has_weights(settings, tmp_path, monkeypatch, sign):
    other = tiny_model(tmp_path / "other")
    began, changed = settings(), settings(f"model.source='{other}'")
    home = Home(began.run.directory)
    save_config(began, home.config)
    check_same_model(changed)  # the first start was refused: nothing was published
    served = home.root / sign
    served.parent.mkdir(parents=True, exist_ok=True)
    served.touch()
    with pytest.raises(
        BadConfig, match=r"is a run of model\.source '.*model' and would serve its weights as '.*other'"
    ) as refusal:
        check_same_model(changed)
    assert "run.directory of its own" in str(refusal.value)
    assert str(home.config) in str(refusal.value)
    check_same_model(began)
    monkeypatch.chdir(tmp_path)
    check_same_model(settings("model.source=model"))  # the same directory in other words
    for damaged in ("{", "[]", "{}"):  # `up` writes it anew
        home.config.write_text(damaged)
        check_same_model(changed)


async def test_up_and_training_in_a_world_look_for_another_model_first(settings, tmp_path):
    began = settings()
    save_config(began, Home(began.run.directory).config)
    Home(began.run.directory).progress("serve").touch()
    changed = settings(f"model.source='{tiny_model(tmp_path / 'other')}'")
    for start in (up(changed, Console()), train_in_world(changed, 1, Console())):
        with pytest.raises(BadConfig, match=r"is a run of model\.source"):
            await start


def test_a_model_that_is_not_there_is_refused_with_what_could_be_named():
    with pytest.raises(
        BadConfig, match=r"'smolm2': no such directory; give one, or a hub name such as .*, or smollm2, the default"
    ):
        check_model(load(None, ["model.source=smolm2"]))


def test_a_demo_keeps_the_cache_that_lies_in_its_run(settings):
    """Where no home can be written, the converted model and compiled kernels of the last demo lie there."""
    config = settings()
    cached = config.run.directory / ".cache" / "ostinato"
    cached.mkdir(parents=True)
    check_emptied(config)
    (config.run.directory / "log").mkdir()
    with pytest.raises(BadConfig, match="not empty"):
        check_emptied(config)
    empty(config.run.directory)
    assert cached.is_dir()
    assert not (config.run.directory / "log").exists()
    check_emptied(config)


class NoRuns(SingleRuns):
    """Sandboxes where the kernel refuses the first step, as in a plain container."""

    async def check(self):
        raise refusal("unshare the user namespace", "Operation not permitted")


@pytest.fixture
def no_sandbox(monkeypatch):
    for module in (checks, demo):
        monkeypatch.setattr(module, "SingleRuns", NoRuns)


async def test_without_a_sandbox_the_demo_goes_on_with_what_runs_no_code(no_sandbox):
    said = io.StringIO()
    assert await choose(None, SandboxConfig(), Console(file=said)) == "tab"
    (line,) = said.getvalue().splitlines()
    for part in ("step 'unshare the user namespace' failed", "To allow it", "Going on with --scenario tab"):
        assert part in line


async def test_without_a_sandbox_the_copilot_is_refused_to_who_asks_for_it(no_sandbox):
    with pytest.raises(SandboxRefused, match=r"To allow it: .* Without it: --scenario tab, which runs no code"):
        await choose("copilot", SandboxConfig(), Console(file=io.StringIO()))


async def test_the_demo_that_runs_no_code_asks_for_no_sandbox(no_sandbox):
    said = io.StringIO()
    assert await choose("tab", SandboxConfig(), Console(file=said)) == "tab"
    assert not said.getvalue()


async def test_a_world_without_a_sandbox_is_refused_before_its_run_starts(no_sandbox, settings, tmp_path):
    file = tmp_path / "tasks.jsonl"
    save(function_tasks(), file)
    with pytest.raises(SandboxRefused, match="unshare the user namespace"):
        await check_start(settings("learn.source=worlds", f"worlds.file='{file}'"))
    await check_start(settings())  # a run that learns from people needs none


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/home/ann/run", "nfs4"),
        ("/home/ann/my runs/one", ""),
        ("/mnt/share/run", "cifs"),
        ("/srv/run", ""),
        ("/tmp", ""),
        ("/mnt/données/run", "nfs4"),
        ("/mnt/a\u00a0b\\x41/run", "cifs"),
    ],
)
def test_a_run_on_another_machines_disk_is_warned_of(tmp_path, place, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "22 21 0:40 / /home rw - nfs4 server:/home rw\n"
        "23 22 8:2 / /home/ann/my\\040runs rw - ext4 /dev/sdb rw\n"
        "24 21 0:41 / /mnt/share rw shared:7 - cifs //server/share rw\n"
        "25 21 0:42 / /tmp rw - nfs server:/tmp rw\n"
        "26 21 0:43 / /tmp rw - tmpfs tmpfs rw\n"
        "27 21 0:44 / /mnt/données rw - nfs4 server:/data rw\n"
        "28 21 0:45 / /mnt/a\u00a0b\\134x41 rw - cifs //server/a rw\n"
    )
    said = network_warning(Path(place), mounts)
    assert f"({kind})" in said if kind else not said
    assert not network_warning(Path(place), tmp_path / "missing")
