"""The files below deploy/ agree with each other and with the configuration; no daemon is needed for any of it."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.deploy_files import (
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    FILES,
    GROUPS,
    IN_CLUSTER,
    OBJECTS,
    ROOT,
    YAML,
    named,
    separated,
    values,
)

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.serve.auth import check_bind, client_keys

# ---------------------------------------------------------------- each file by itself


@pytest.mark.parametrize("path", YAML, ids=named)
def test_yaml_is_read(path):
    assert all(isinstance(each, dict) for each in yaml.safe_load_all(path.read_text()))


def test_json_and_toml_are_read():
    for path in FILES:
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.suffix == ".toml":
            tomllib.loads(path.read_text())


SECRET = r"\w*(?:password|passwd|secret|token|credential|api_?key|access_?key|private_?key)\w*"
GIVEN = re.compile(rf"(?i)({SECRET})['\"]?\s*[=:]\s*\[?['\"]?([^\s'\",\]]+)")
BARE = re.compile(r"-----BEGIN|://[^/\s:@]+:[^@\s/]+@|\bsk-[A-Za-z0-9]{8}|\bAKIA[A-Z0-9]{12}")
NAMES = re.compile(r"(?i)(Name|_env|secrets|secretKeyRef|secret)$")
"""Keys whose value is the name of something secret, not the secret."""
REFERENCE = re.compile(r"/run/secrets/|\$\{\w+:\?|\$\$\(cat ?|scram-sha-256$")


def written_down(tree: Any, key: str = "") -> Iterator[str]:
    """What gives something secret a value of its own, instead of saying where it comes from."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from written_down(value, str(name))
    elif isinstance(tree, list):
        for each in tree:
            yield from written_down(each, key)
    elif isinstance(tree, str):
        if re.fullmatch(f"(?i){SECRET}", key) and not NAMES.search(key) and not REFERENCE.match(tree):
            yield f"{key}: {tree}"
        text = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in tree.splitlines())
        for name, value in GIVEN.findall(text):
            if not NAMES.search(name) and not REFERENCE.match(value):
                yield f"{name}={value}"
        yield from BARE.findall(tree)


@pytest.mark.parametrize(
    "planted",
    [
        "POSTGRES_PASSWORD: hunter2",
        "environment: [POSTGRES_PASSWORD=hunter2]",
        "url: postgresql://ostinato:hunter2@postgres/ostinato",
        "command: [sh, -c, AWS_SECRET_ACCESS_KEY=abcdef exec weed]",
        "GF_SECURITY_ADMIN_PASSWORD: '${PASSWORD:-admin}'",
        "stringData: {token: abcdef}",
        "ostinato.toml: |\n  [serve]\n  api_keys = ['acme:0123456789abcdef']",
        "key: '-----BEGIN PRIVATE KEY-----'",
    ],
)
def test_a_planted_secret_is_found(planted):
    assert list(written_down(yaml.safe_load(planted)))


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix not in (".py", ".md", ".lock")], ids=named)
def test_no_secret_is_written_down(path):
    text = path.read_text()
    trees = list(yaml.safe_load_all(text)) if path.suffix in (".yaml", ".json") else [text]
    assert [found for tree in trees for found in written_down(tree)] == []


def test_no_kubernetes_secret_lies_here():
    assert not [each for each in OBJECTS if each["kind"] == "Secret"]


def test_no_variable_has_a_default_but_where_torch_comes_from():
    text = (DEPLOY / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)(?::-|-)", text)) == {"TORCH_INDEX"}
    assert "${OSTINATO_SECRETS:?" in text


# ---------------------------------------------------------------- the image and the tags


def test_every_image_is_pinned_by_version():
    images = [*values(COMPOSE, "image"), *values(OBJECTS, "image")]
    python = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert python
    images.append(f"python:{python[1]}")
    assert len(images) > 8
    for image in images:
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?(-[a-z]+)?(-[a-z]+)?", image), image


def test_the_image_is_of_this_version_of_the_project():
    (version,) = re.findall(r'__version__ = "([^"]+)"', (ROOT / "src" / "ostinato" / "__init__.py").read_text())
    for image in (COMPOSE["services"]["ostinato"]["image"], *values(OBJECTS, "image")):
        assert image.endswith(f"ostinato:{version}"), image


def test_whoever_builds_sends_no_more_than_what_is_copied():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert "*" in ignored
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    assert kept == {word.removeprefix("./") for word in copied}
    assert all((ROOT / name).exists() for name in kept)


def test_the_image_runs_as_somebody_and_asks_how_the_gateway_is():
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert "/health" in last.partition("HEALTHCHECK")[2]
    assert not re.search(r"(?i)^(ARG|ENV) .*(password|secret|token|key)", DOCKERFILE, re.MULTILINE)


# ---------------------------------------------------------------- the configurations


def test_the_configuration_of_compose_has_no_unknown_key():
    config = load(DEPLOY / "ostinato.toml")
    assert config.record.url.startswith("postgresql://ostinato@postgres/")
    assert config.weights.options["aws_endpoint"] == "http://bucket:8333"


@pytest.mark.parametrize("text", [(DEPLOY / "ostinato.toml").read_text(), IN_CLUSTER], ids=["compose", "kuberay"])
def test_a_gateway_that_others_reach_needs_the_keys_that_it_is_given(text, tmp_path):
    path, _ = separated(text, tmp_path)
    config, keys = load(path), tmp_path / "api_keys"
    assert not config.serve.api_keys
    with pytest.raises(BadConfig, match=r"api_keys_file: /run/secrets/.*cannot be read"):
        client_keys(config.serve.api_keys, config.serve.api_keys_file)
    with pytest.raises(BadConfig, match="api_keys"):
        check_bind(config.listen.host, ())
    keys.write_text("acme:0123456789abcdef\n")
    keys.chmod(0o440)
    check_bind(config.listen.host, client_keys((), keys))


# ---------------------------------------------------------------- compose


def test_what_compose_mounts_and_what_is_asked_for_is_there():
    for each in COMPOSE["configs"].values():
        assert (DEPLOY / each["file"]).is_file(), each
    for name, service in COMPOSE["services"].items():
        wanted = {each["source"] for each in service.get("configs", ())}
        assert wanted <= set(COMPOSE["configs"]), name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service["networks"]) <= set(COMPOSE["networks"]), name
        volumes = {each.partition(":")[0] for each in service.get("volumes", ())}
        assert volumes <= set(COMPOSE["volumes"]), name
        named = json.dumps([service.get(key) for key in ("entrypoint", "command", "environment")])
        named += (DEPLOY / "ostinato.toml").read_text() if name == "ostinato" else ""
        read = set(re.findall(r"/run/secrets/(\w+)", named))
        assert read <= set(service.get("secrets", ())), name
    assert {secret for each in COMPOSE["services"].values() for secret in each.get("secrets", ())} == set(
        COMPOSE["secrets"]
    )


def test_only_the_proxy_is_reached_from_outside():
    open_to_all = {
        name
        for name, service in COMPOSE["services"].items()
        if any(not port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    }
    assert open_to_all == {"proxy"}
    assert COMPOSE["networks"]["store"]["internal"] is True
    assert COMPOSE["networks"]["objects"]["internal"] is True
    beside = {name for name, service in COMPOSE["services"].items() if "objects" in service["networks"]}
    assert beside == {"bucket", "ostinato"}


def test_no_service_takes_all_of_the_host():
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"\d+g", service["mem_limit"]), name
        assert service["pids_limit"] > 0, name
        assert service["logging"]["options"] == {"max-size": "20m", "max-file": "5"}, name


def test_a_command_beside_the_run_gets_its_secrets_as_the_run_does():
    """Another container would not see the run's processes, and take it for dead."""
    readme = re.sub(r"\\\n\s*", "", (DEPLOY / "README.md").read_text())
    assert "docker compose run" not in readme.replace("-f deploy/compose.yaml ", "")
    (line,) = re.findall(
        r"^docker compose -f deploy/compose.yaml exec ostinato (.*) -- ostinato status$", readme, re.MULTILINE
    )
    entry = [word for word in COMPOSE["services"]["ostinato"]["entrypoint"] if word != "--"]
    assert line.split() == [word for word in entry if not word.startswith(("--lines", "--text"))]


def test_the_log_s_server_keeps_what_it_confirmed():
    command = COMPOSE["services"]["postgres"]["command"]
    assert {"--fsync=on", "--synchronous_commit=on", "--full_page_writes=on"} <= set(command)
    assert "--encoding=UTF8" in COMPOSE["services"]["postgres"]["environment"]["POSTGRES_INITDB_ARGS"]


def test_whoever_has_a_tongue_says_how_it_is():
    for name, service in COMPOSE["services"].items():
        assert "healthcheck" in service or (name == "ostinato" and "HEALTHCHECK" in DOCKERFILE), name


def test_a_worker_has_time_to_stop():
    stop_s = load(DEPLOY / "ostinato.toml").supervise.stop_s
    assert int(COMPOSE["services"]["ostinato"]["stop_grace_period"].removesuffix("s")) > stop_s
    for group in GROUPS:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > stop_s


def test_prometheus_scrapes_the_gateway_s_port_with_a_key_for_nothing_else():
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"ostinato:{load(DEPLOY / 'ostinato.toml').listen.port}"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert COMPOSE["services"]["prometheus"]["secrets"] == ["metrics_key"]
    assert "--text=serve.metrics_key=/run/secrets/metrics_key" in COMPOSE["services"]["ostinato"]["entrypoint"]


def test_every_file_stands_in_the_readme():
    readme = (DEPLOY / "README.md").read_text()
    folders = {"grafana/provisioning"}
    for path in FILES:
        name = named(path)
        folder = next((each for each in folders if name.startswith(f"{each}/")), None)
        assert f"`{folder or name}" in readme or name == "README.md", name


# ---------------------------------------------------------------- programs that know better, where they are


def test_caddy_takes_the_proxy_s_file(tmp_path):
    if shutil.which("caddy") is None:
        pytest.skip("no Caddy here: apt-get install caddy")
    ran = subprocess.run(
        ["caddy", "validate", "--config", str(DEPLOY / "Caddyfile"), "--adapter", "caddyfile"],
        env={"OSTINATO_DOMAIN": "llm.example.com", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
    )
    assert ran.returncode == 0, ran.stderr
