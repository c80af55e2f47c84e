"""The files below deploy/ agree with each other and with the configuration; no daemon is needed for any of it."""

import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ostinato.config import Config, load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.up import WORKERS
from ostinato.serve.auth import check_bind

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
YAML = [path for path in FILES if path.suffix == ".yaml"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = [
    each for path in YAML if path.parent.name == "kuberay" for each in yaml.safe_load_all(path.read_text()) if each
]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def named(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def of_kind(kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


CLUSTER = of_kind("RayJob")["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"] | {"groupName": "head"}, *CLUSTER["workerGroupSpecs"]]
IN_CLUSTER: str = of_kind("ConfigMap")["data"]["ostinato.toml"]


def values(tree: Any, key: str) -> Iterator[Any]:
    """Every value under this key, wherever it stands."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(tree, list):
        for each in tree:
            yield from values(each, key)


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


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix not in (".py", ".md")], ids=named)
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


def test_the_image_has_what_the_constraints_name():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    args = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    assert args["TORCH"] == pins["torch"]
    assert args["RAY"] == CLUSTER["rayVersion"]
    assert args["RAY"] == pins.get("ray", args["RAY"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r'"\.\[([a-z,]+)\]"', DOCKERFILE)
    known = set(extras) if "ray" in Config.model_fields else {*extras, "ray"}
    assert set(asked.split(",")) <= known


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


def separated(text: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The configuration without `[ray]`, as a file, and `[ray]`, which stands last."""
    rest, mark, ray = text.partition("[ray]")
    path = tmp_path / "ostinato.toml"
    path.write_text(rest)
    return path, tomllib.loads(mark + ray).get("ray", {})


def test_the_configuration_of_compose_has_no_unknown_key():
    config = load(DEPLOY / "ostinato.toml")
    assert config.record.url.startswith("postgresql://ostinato@postgres/")
    assert config.weights.options["aws_endpoint"] == "http://bucket:8333"


def test_the_configuration_of_the_cluster_has_no_unknown_key(tmp_path):
    path, ray = separated(IN_CLUSTER, tmp_path)
    config = load(path)
    assert ray
    assert config.record.url.startswith("postgresql://")
    assert config.weights.url.startswith("s3://")


def test_the_cluster_s_ray_section_is_one_that_ostinato_knows(tmp_path):
    if "ray" not in Config.model_fields:
        pytest.skip("this version has no [ray] section yet, so its keys cannot be checked")
    path = tmp_path / "ostinato.toml"
    path.write_text(IN_CLUSTER)
    load(path)


def test_a_wrong_key_would_be_found(tmp_path):
    path, _ = separated(IN_CLUSTER.replace("password_env", "passwort_env"), tmp_path)
    with pytest.raises(BadConfig, match="passwort_env"):
        load(path)


@pytest.mark.parametrize("text", [(DEPLOY / "ostinato.toml").read_text(), IN_CLUSTER], ids=["compose", "kuberay"])
def test_a_gateway_that_others_reach_needs_the_keys_that_it_is_given(text, tmp_path):
    path, _ = separated(text, tmp_path)
    with pytest.raises(BadConfig, match="api_keys"):
        check_bind(load(path).listen.host, load(path).serve.api_keys)


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
        read = set(re.findall(r"/run/secrets/(\w+)", json.dumps([service.get("command"), service.get("environment")])))
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


def test_prometheus_scrapes_the_gateway_s_port_with_the_operator_s_key():
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"ostinato:{load(DEPLOY / 'ostinato.toml').listen.port}"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/admin_key"
    assert "admin_key" in COMPOSE["services"]["prometheus"]["secrets"]


# ---------------------------------------------------------------- kuberay


def test_every_worker_finds_a_group_that_has_what_it_takes(tmp_path):
    _, ray = separated(IN_CLUSTER, tmp_path)
    for worker in (*WORKERS, "rollout"):
        needs = {"CPU": ray.get("cpus", {}).get(worker, 1)} | ray.get("resources", {}).get(worker, {})
        fitting = [
            group["groupName"]
            for group in CLUSTER["workerGroupSpecs"]
            if group["maxReplicas"] > 0
            and all(float(group["resources"].get(name, 0)) >= amount for name, amount in needs.items())
        ]
        assert fitting, (worker, needs)
    assert set(ray["cpus"]) | set(ray["resources"]) <= {*WORKERS, "rollout"}


def test_nobody_s_readiness_waits_for_the_driver_that_waits_for_it():
    """KubeRay starts a RayJob's driver once every pod is ready; a pod that is ready only with a gateway in it must come later."""
    asks_gateway = [
        group
        for group in CLUSTER["workerGroupSpecs"]
        if any(probe["httpGet"]["path"] == "/health" for probe in values(group, "readinessProbe"))
    ]
    assert [group["groupName"] for group in asks_gateway] == ["gateway"]
    for group in asks_gateway:
        assert group["replicas"] == group["minReplicas"] == 0


def test_groups_give_ray_no_more_than_their_pods_have():
    for group in CLUSTER["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        asked, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert asked == limits, "a node that Ray believes larger than it is gets killed"
        assert group["resources"]["CPU"] == asked["cpu"]
        assert group["resources"].get("GPU", "0") == asked.get("nvidia.com/gpu", "0")
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_all_pods_run_as_somebody_without_rights_and_take_secrets_by_reference():
    for group in GROUPS:
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("secretKeyRef" in each["valueFrom"] for each in container["env"])
            config, _ = IN_CLUSTER.split("[weights]")
            assert f'password_env = "{container["env"][0]["name"]}"' in config


def test_mounts_and_selectors_name_what_there_is():
    labels = [group["template"]["metadata"]["labels"] for group in GROUPS]
    service = of_kind("Service")
    selectors = [service["spec"]["selector"]]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in OBJECTS if each["kind"] == "PodDisruptionBudget"]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in OBJECTS if each["kind"] == "NetworkPolicy"]
    assert len(selectors) == 8
    for selector in selectors:
        assert any(selector.items() <= label.items() for label in labels), selector
    for group in GROUPS:
        spec = group["template"]["spec"]
        for container in spec["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in spec["volumes"]}, group["groupName"]
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim == of_kind("PersistentVolumeClaim")["metadata"]["name"]


def test_the_way_in_ends_at_the_gateway_s_port_under_tls():
    ingress, service = of_kind("Ingress"), of_kind("Service")
    (rule,) = ingress["spec"]["rules"]
    (tls,) = ingress["spec"]["tls"]
    assert tls["hosts"] == [rule["host"]]
    assert tls["secretName"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    assert backend["port"] == {"name": port["name"]}
    (gateway,) = (group for group in GROUPS if group["groupName"] == "gateway")
    ports = {each["name"]: each["containerPort"] for each in gateway["template"]["spec"]["containers"][0]["ports"]}
    assert ports[port["targetPort"]] == tomllib.loads(IN_CLUSTER)["listen"]["port"]
    allowed = of_kind("NetworkPolicy", "ostinato-gateway")["spec"]["ingress"][0]["ports"]
    assert [each["port"] for each in allowed] == [ports[port["targetPort"]]]


def test_kustomize_names_every_file():
    (kustomization,) = (each for each in OBJECTS if each["kind"] == "Kustomization")
    files = {path.name for path in (DEPLOY / "kuberay").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files


def test_every_file_stands_in_the_readme():
    readme = (DEPLOY / "README.md").read_text()
    folders = {"grafana/provisioning"}
    for path in FILES:
        name = named(path)
        folder = next((each for each in folders if name.startswith(f"{each}/")), None)
        assert f"`{folder or name}" in readme or name == "README.md", name


# ---------------------------------------------------------------- programs that know better, where they are


def test_kubernetes_own_schemas_are_kept():
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("no schemas of Kubernetes here: pip install kubernetes-validate (72 MB)")
    validate = importlib.import_module("kubernetes_validate").validate
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        for group in GROUPS
    ]
    for each in [*OBJECTS, *pods]:
        if each["kind"] not in ("RayJob", "Kustomization"):
            validate(each, "1.34", strict=True)


def test_caddy_takes_the_proxy_s_file(tmp_path):
    if shutil.which("caddy") is None:
        pytest.skip("no Caddy here: apt-get install caddy")
    ran = subprocess.run(
        ["caddy", "validate", "--config", str(DEPLOY / "Caddyfile"), "--adapter", "caddyfile"],
        env={"OSTINATO_DOMAIN": "llm.example.com", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
