"""The Kubernetes manifests agree with each other, with their configurations, and with the node."""

import json

import kubernetes_validate
import pytest
import yaml

from holdfast.address import tcp_endpoint
from holdfast.config import load
from holdfast.node.http.pages import NodePages

GRACE_S = 60
"""Longest time that a node writes at its end."""


@pytest.fixture
def manifests(deploy):
    """Every object that kustomization.yaml names, by kind and name."""
    folder = deploy / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = {}
    for file in kustomization["resources"]:
        for one in yaml.safe_load_all((folder / file).read_text()):
            found[one["kind"], one["metadata"]["name"]] = one
    for generated in kustomization["configMapGenerator"]:
        (pair,) = generated["files"]
        name, _, file = pair.partition("=")
        found["ConfigMap", generated["name"]] = {"data": {name: (folder / file).read_text()}}
    return found


WORKLOADS = [("DaemonSet", "holdfast-node"), ("StatefulSet", "holdfast-target")]


def container_of(workload):
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def config_of(workload, manifests, tmp_path):
    """The configuration that a workload's container serves with, and the mounts of its volumes."""
    container, pod = container_of(workload), workload["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = [each for each in pod["volumes"] if "configMap" in each]
    ((name, text),) = manifests["ConfigMap", volume["configMap"]["name"]]["data"].items()
    assert container["args"] == ["serve", "--config", f"{mounts[volume['name']]}/{name}"]
    file = tmp_path / name
    file.write_text(text)
    return load(str(file), {"tiers.0.capacity": "64 MiB"}), mounts


@pytest.mark.parametrize("which", WORKLOADS, ids=lambda which: which[1])
def test_probes_and_ports_are_those_of_the_configuration(manifests, tmp_path, which):
    container = container_of(manifests[which])
    config, _ = config_of(manifests[which], manifests, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == tcp_endpoint(config.http.listen).port
    for address in config.target_addresses:
        assert tcp_endpoint(address).port == ports["records"]
    routes = NodePages(None, None).routes()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == "http"
        assert asked["path"] in routes.public


@pytest.mark.parametrize("which", WORKLOADS, ids=lambda which: which[1])
def test_every_path_of_a_configuration_is_on_a_volume(manifests, tmp_path, which):
    config, mounts = config_of(manifests[which], manifests, tmp_path)
    keys = [each.key_command[-1] for each in config.domains.values() if each.key_command]
    paths = [
        *(config.node_address.removeprefix("unix://"), config.http.token_file),
        *(config.tls.cert, config.tls.key, config.tls.ca),
        *(tier.path for tier in config.tiers if hasattr(tier, "path")),
        *keys,
    ]
    for path in paths:
        assert any(path.startswith(f"{mount}/") for mount in mounts.values()), path


@pytest.mark.parametrize("which", WORKLOADS, ids=lambda which: which[1])
def test_pods_are_confined_and_have_time_to_write_at_their_end(manifests, which):
    pod = manifests[which]["spec"]["template"]["spec"]
    container = container_of(manifests[which])
    assert pod["terminationGracePeriodSeconds"] > GRACE_S
    assert pod["securityContext"]["runAsNonRoot"] is True
    confined = container["securityContext"]
    assert confined["readOnlyRootFilesystem"] is True
    assert confined["allowPrivilegeEscalation"] is False
    assert confined["capabilities"] == {"drop": ["ALL"]}


def test_selectors_find_their_pods(manifests):
    for kind, name in WORKLOADS:
        workload = manifests[kind, name]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    labels = manifests["StatefulSet", "holdfast-target"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifests["Service", "holdfast-target"]["spec"]["selector"],
        manifests["PodDisruptionBudget", "holdfast-target"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy", "holdfast-target"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)


def test_nodes_may_watch_the_endpoints_of_the_service_that_they_name(manifests, tmp_path):
    config, _ = config_of(manifests["DaemonSet", "holdfast-node"], manifests, tmp_path)
    service = manifests["Service", "holdfast-target"]
    ports = [port["name"] for port in service["spec"]["ports"]]
    pool = config.tiers[2].members
    assert pool == f"kubernetes://holdfast/{service['metadata']['name']}:{ports[0]}"
    (rule,) = manifests["Role", "holdfast-node"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["list", "watch"])


def test_the_example_of_an_engine_finds_the_node_of_its_machine(deploy, manifests, tmp_path):
    engine = yaml.safe_load((deploy / "kubernetes" / "examples" / "vllm.yaml").read_text())
    for version in sorted(set(kubernetes_validate.utils.all_versions())):
        kubernetes_validate.validate(engine, version, strict=True)
    nodes = manifests["DaemonSet", "holdfast-node"]
    config, _ = config_of(nodes, manifests, tmp_path)
    pod, node_pod = (each["spec"]["template"]["spec"] for each in (engine, nodes))
    assert pod["nodeSelector"] == node_pod["nodeSelector"]
    folders = {
        each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each
    }
    container = container_of(engine)
    mounted = {each["mountPath"]: folders[each["name"]] for each in container["volumeMounts"]}
    assert mounted["/run/holdfast"] == "/run/holdfast"
    args = container["args"]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["holdfast"] == config.node_address
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert engine["spec"]["selector"]["matchLabels"].items() <= labels.items()
