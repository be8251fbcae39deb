"""`kubectl apply` sends the manifests as the page says, and each fits Kubernetes' schemas.

A server of these tests takes the place of a cluster: it speaks as much of the API as kubectl asks
for, checks each object as a cluster does before it stores it, and runs nothing.
"""

import json
import re
import shutil
import subprocess
import threading
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 120
VERSIONS = sorted(set(kubernetes_validate.utils.all_versions()))
"""All that the package has schemas of: 1.25 and newer."""
KINDS = {
    "v1": {
        "namespaces": "Namespace",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
    },
    "apps/v1": {"daemonsets": "DaemonSet", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}


def root_of(version):
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def discovery():
    """Return the answers about the API itself, by path."""
    groups = [version.split("/") for version in KINDS if "/" in version]
    answers = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                }
                for group, version in groups
            ],
        },
        "/openapi/v3": {"paths": {}},
    }
    for version, kinds in KINDS.items():
        root = root_of(version)
        answers[root] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {
                    "name": name,
                    "kind": kind,
                    "namespaced": kind != "Namespace",
                    "verbs": ["create", "get", "patch"],
                }
                for name, kind in kinds.items()
            ],
        }
        # kubectl reads here whether the server checks fields.
        answers["/openapi/v3"]["paths"][root[1:]] = {"serverRelativeURL": f"/openapi/v3{root}"}
        group, _, last = version.rpartition("/")
        answers[f"/openapi/v3{root}"] = {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1.32.4"},
            "paths": {
                f"{root}/{name}/{{name}}": {
                    "patch": {
                        "parameters": [{"name": "fieldValidation", "in": "query"}],
                        "x-kubernetes-group-version-kind": {
                            "group": group,
                            "version": last,
                            "kind": kind,
                        },
                    }
                }
                for name, kind in kinds.items()
            },
        }
    return answers


class Api(BaseHTTPRequestHandler):
    """Answers kubectl. Created objects are in `server.objects`, by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = urlsplit(self.path).path
        found = self.server.discovery.get(path) or self.server.objects.get(path)
        if found:
            self.answer(HTTPStatus.OK, found)
        else:
            self.refuse(HTTPStatus.NOT_FOUND, f"{path} is not there")

    def do_POST(self):
        one = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = urlsplit(self.path).path
        try:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as e:
            self.refuse(HTTPStatus.UNPROCESSABLE_ENTITY, f"{one['kind']}: {version}: {e.message}")
            return
        self.server.objects[f"{path}/{one['metadata']['name']}"] = one
        self.answer(HTTPStatus.CREATED, one)

    def refuse(self, status, message):
        reason = "NotFound" if status == HTTPStatus.NOT_FOUND else "Invalid"
        self.answer(
            status,
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": reason,
                "code": status,
                "message": message,
            },
        )

    def answer(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def cluster():
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        server.discovery, server.objects = discovery(), {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def kubectl(tmp_path, cluster, find_program):
    """Run kubectl with the cluster; returns the finished process."""
    program = find_program("kubernetes-client", "kubectl")
    config = tmp_path / "kubeconfig"
    url = f"http://127.0.0.1:{cluster.server_port}"
    config.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "here", "cluster": {"server": url}}],
                "contexts": [{"name": "here", "context": {"cluster": "here"}}],
                "current-context": "here",
            }
        )
    )

    def run(commands):
        path = f"{Path(program).parent}:/usr/bin:/bin"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "KUBECONFIG": str(config), "PATH": path},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )

    return run


@pytest.fixture
def clone(tmp_path, deploy):
    """deploy/ in the folder where commands run, and the files of the secrets beside it."""
    shutil.copytree(deploy, tmp_path / "deploy")
    names = "ca.crt", "node.crt", "node.key", "target.crt", "target.key"
    for name in names:
        (tmp_path / name).write_text(name)
    return tmp_path


def page():
    """Return the commands that the page shows: for the secrets, and for all else."""
    text = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    return [
        block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "kubectl" in block
    ]


def secrets_of(pod):
    return {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}


def test_the_manifests_are_applied_as_the_page_says(clone, cluster, kubectl):
    secrets, apply = page()
    done = kubectl(secrets + apply)
    assert done.returncode == 0, done.stderr
    kinds = Counter(one["kind"] for one in cluster.objects.values())
    assert kinds == {
        **dict.fromkeys(("Namespace", "ServiceAccount", "Role", "RoleBinding"), 1),
        **dict.fromkeys(("Service", "StatefulSet", "PodDisruptionBudget", "DaemonSet"), 1),
        "NetworkPolicy": 1,
        "ConfigMap": 2,
        "Secret": 4,
    }
    made = {one["metadata"]["name"] for one in cluster.objects.values() if one["kind"] == "Secret"}
    pods = [
        one["spec"]["template"]["spec"]
        for one in cluster.objects.values()
        if one["kind"] in {"DaemonSet", "StatefulSet"}
    ]
    assert set.union(*map(secrets_of, pods)) == made


def test_an_unknown_field_is_refused(clone, cluster, kubectl):
    manifest = clone / "deploy" / "kubernetes" / "target.yaml"
    manifest.write_text(manifest.read_text().replace("replicas:", "copies:"))
    _, apply = page()
    done = kubectl(apply)
    assert done.returncode == 1
    assert "'copies' was unexpected" in done.stderr
