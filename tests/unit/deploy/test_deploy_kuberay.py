"""The manifests for KubeRay agree with each other and with the configuration that they carry."""

import importlib
import importlib.util
import json
import tomllib

import pytest
from tests.fakes.deploy_files import (
    CLUSTER,
    DEPLOY,
    GROUPS,
    IN_CLUSTER,
    OBJECTS,
    of_kind,
    separated,
    values,
)

from ostinato.config import Config, load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.crew import WORKERS
from ostinato.worlds.rollout.config import DoorConfig


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


ROLLOUTS = of_kind("Deployment")["spec"]


def test_pods_that_run_generated_code_hold_no_secret_but_their_own_certificate():
    pod = ROLLOUTS["template"]["spec"]
    assert not [*values(pod, "secretKeyRef"), *values(pod, "envFrom"), *values(pod, "env")]
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == ["ostinato-rollouts"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    unconfined = [each for each in (*GROUPS, ROLLOUTS) if "Unconfined" in json.dumps(each)]
    assert unconfined == [ROLLOUTS]
    reached = {
        port["port"]
        for rule in of_kind("NetworkPolicy", "ostinato-rollouts")["spec"]["egress"]
        for port in rule["ports"]
    }
    assert reached == {53, 8443}


def test_those_pods_are_no_part_of_the_cluster_whose_ports_run_anything():
    cluster = of_kind("NetworkPolicy", "ostinato-cluster")["spec"]["podSelector"]["matchLabels"]
    labels = ROLLOUTS["template"]["metadata"]["labels"]
    assert not cluster.items() <= labels.items()


def test_the_pods_are_told_the_door_that_the_service_leads_to():
    (container,) = ROLLOUTS["template"]["spec"]["containers"]
    words = dict(each.removeprefix("--").split("=", 1) for each in container["args"])
    door = of_kind("Service", "ostinato-door")
    assert words["connect"] == f"https://{door['metadata']['name']}:{door['spec']['ports'][0]['port']}"
    (group,) = (group for group in GROUPS if group["groupName"] == "door")
    (port,) = group["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "door", "containerPort": door["spec"]["ports"][0]["port"]} == port
    assert DoorConfig().port == port["containerPort"]


def test_the_door_s_settings_that_are_commented_out_are_right(tmp_path):
    lines = IN_CLUSTER.replace("# source =", "source =").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("# [worlds.door]"))
    lines[start : start + 5] = [line.removeprefix("# ") for line in lines[start : start + 5]]
    path, _ = separated("\n".join(lines), tmp_path)
    config = load(path)
    assert config.learn.source == "both"
    assert config.worlds.door.certificate == "/run/secrets/door/tls.crt"


def test_no_worker_of_the_cluster_has_a_token_of_kubernetes():
    """The head needs one: the autoscaler beside it asks for pods."""
    for group in GROUPS[1:]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False, group["groupName"]


def test_mounts_and_selectors_name_what_there_is():
    labels = [group["template"]["metadata"]["labels"] for group in [*GROUPS, ROLLOUTS]]
    selectors = [each["spec"]["selector"] for each in OBJECTS if each["kind"] == "Service"]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in OBJECTS if each["kind"] == "PodDisruptionBudget"]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in OBJECTS if each["kind"] == "NetworkPolicy"]
    assert len(selectors) == 10
    for selector in selectors:
        assert any(selector.items() <= label.items() for label in labels), selector
    for group in [*GROUPS, ROLLOUTS]:
        spec = group["template"]["spec"]
        for container in spec["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in spec["volumes"]}, mounted
        for volume in spec["volumes"]:
            if volume["name"] == "config":
                assert volume["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim == of_kind("PersistentVolumeClaim")["metadata"]["name"]


def test_whoever_reads_callers_keys_has_them_and_nobody_else():
    """`up` on the head looks whether there are any before it starts anything; the gateway asks for them."""
    (config,) = [line for line in IN_CLUSTER.splitlines() if "api_keys_file" in line]
    place = config.split('"')[1]
    having = set()
    for group in GROUPS:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in spec["volumes"]:
            if volume["name"] == "keys":
                keys = [item["key"] for item in volume["secret"].get("items", ())] or [
                    "api_keys",
                    "admin_key",
                    "metrics_key",
                ]
                assert f"{mounts[volume['name']]}/api_keys" == place
                assert "api_keys" in keys
                assert volume["secret"]["defaultMode"] & 0o007 == 0
                having.add(group["template"]["metadata"]["labels"]["app.kubernetes.io/component"])
    assert having == {"head", "gateway"}


def test_a_run_is_not_given_up_for_failures_that_were_long_ago():
    """KubeRay counts the failures of a RayJob's whole life, and those of a submitter's output beside them."""
    job = of_kind("RayJob")["spec"]
    assert job["backoffLimit"] >= 100_000
    assert job["submissionMode"] == "HTTPMode"
    assert "submitterConfig" not in job
    assert job["shutdownAfterJobFinishes"] is False


def test_the_head_is_reached_by_the_operator_that_starts_the_run():
    (rule,) = of_kind("NetworkPolicy", "ostinato-head")["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert "kuberay-system" in json.dumps(rule["from"])


def test_a_budget_is_one_that_kubernetes_can_count():
    """A RayCluster says no scale: with maxUnavailable or a percentage every eviction is refused, of workers that may go, too."""
    budgets = [each["spec"] for each in OBJECTS if each["kind"] == "PodDisruptionBudget"]
    assert [budget["minAvailable"] for budget in budgets] == [1, 1, 1]
    assert not any("maxUnavailable" in budget for budget in budgets)
    components = {budget["selector"]["matchLabels"]["app.kubernetes.io/component"] for budget in budgets}
    assert components == {"gateway", "head", "train"}


def test_the_autoscaler_beside_the_head_has_no_more_rights_than_the_head():
    (head,) = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"]
    assert CLUSTER["autoscalerOptions"]["securityContext"] == head["securityContext"]


def test_a_pod_has_the_time_that_ray_drains_it_and_a_worker_takes_to_end():
    """Ray drains a node that is told to end for 30 s, in which its workers end; then it kills what is left."""
    for group in GROUPS:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 30 + 20


def test_the_way_in_ends_at_the_gateway_s_port_under_tls():
    ingress, service = of_kind("Ingress"), of_kind("Service", "ostinato-gateway")
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


def test_kubernetes_own_schemas_are_kept():
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("no schemas of Kubernetes here: pip install kubernetes-validate (72 MB)")
    validate = importlib.import_module("kubernetes_validate").validate
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        for group in [*GROUPS, ROLLOUTS]
    ]
    for each in [*OBJECTS, *pods]:
        if each["kind"] not in ("RayJob", "Kustomization"):
            validate(each, "1.34", strict=True)
