"""The files in examples/deploy: their flags, probes, times and metric names are those of a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import ROOT, ServerProcess
from minisgl.settings.options import ServerArgs
from minisgl.settings.sources import parse_args

DEPLOY = ROOT / "examples" / "deploy"
# What a pod sees beside a service "minisgl" with the port 80 and one "minisgl-ranks".
OF_SERVICES = {
    "MINISGL_SERVICE_HOST": "10.96.7.8",
    "MINISGL_SERVICE_PORT": "80",
    "MINISGL_SERVICE_PORT_HTTP": "80",
    "MINISGL_PORT": "tcp://10.96.7.8:80",
    "MINISGL_PORT_80_TCP": "tcp://10.96.7.8:80",
    "MINISGL_PORT_80_TCP_PROTO": "tcp",
    "MINISGL_PORT_80_TCP_PORT": "80",
    "MINISGL_PORT_80_TCP_ADDR": "10.96.7.8",
    "MINISGL_RANKS_PORT": "tcp://10.96.7.9:29500",
    "MINISGL_RANKS_SERVICE_HOST": "10.96.7.9",
}
METRIC = re.compile(r"minisgl:[\w:]+")


def documents(name: str) -> dict[str, Any]:
    """The documents of a YAML file by kind and name."""
    return {f"{d['kind']} {d['metadata']['name']}": d for d in yaml.safe_load_all((DEPLOY / name).read_text())}


def pod_of(workload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of the pods, and that of their only container."""
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def parsed(container: dict[str, Any], folder: Path) -> ServerArgs:
    """The server's options, with a file of keys in place of the mounted one."""
    (folder / "keys").write_text("secret\n")
    return parse_args([word.replace("/etc/minisgl/keys", str(folder / "keys")) for word in container["args"]])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--host", "0.0.0.0", "--api-key", "secret", "--open-metrics")
    with ServerProcess(*flags, stub=True, env=OF_SERVICES) as server:
        yield server


def test_variables_of_services_are_not_options(server: ServerProcess) -> None:
    assert "MINISGL_" not in server.log


@pytest.mark.parametrize(
    ("file", "workload", "service"),
    [
        ("kubernetes.yaml", "Deployment minisgl", "Service minisgl"),
        ("kubernetes-hosts.yaml", "StatefulSet minisgl-large", "Service minisgl-large"),
    ],
)
def test_pods_serve_drain_and_are_found(file: str, workload: str, service: str, tmp_path: Path) -> None:
    found = documents(file)
    spec, container = pod_of(found[workload])
    args = parsed(container, tmp_path)
    assert args.host == "0.0.0.0" and args.api_key_file and args.open_metrics
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] >= int(seconds) + args.drain_timeout + 5
    labels = found[workload]["spec"]["template"]["metadata"]["labels"]
    assert found[workload]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    selector = {k: v for k, v in found[service]["spec"]["selector"].items() if k != "apps.kubernetes.io/pod-index"}
    assert selector.items() <= labels.items()
    assert found[service]["spec"]["ports"][0]["targetPort"] == "http"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


def test_hosts_meet_where_pod_0_is(tmp_path: Path) -> None:
    found = documents("kubernetes-hosts.yaml")
    pods = found["StatefulSet minisgl-large"]
    args = parsed(pod_of(pods)[1], tmp_path)
    ranks = found[f"Service {pods['spec']['serviceName']}"]["spec"]
    assert pods["spec"]["replicas"] == args.scheduler.engine.nnodes
    assert args.scheduler.engine.dist_init_addr == f"minisgl-large-0.minisgl-ranks:{ranks['ports'][0]['port']}"
    gpus = pod_of(pods)[1]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus * args.scheduler.engine.nnodes == args.scheduler.engine.tp
    assert ranks["clusterIP"] == "None" and ranks["publishNotReadyAddresses"]


def test_probes_need_no_key(server: ServerProcess) -> None:
    deployment = documents("kubernetes.yaml")["Deployment minisgl"]
    _, container = pod_of(deployment)
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
    paths = [*(probe["path"] for probe in probes), annotations["prometheus.io/path"]]
    assert paths[2] == "/ready" and {probe["port"] for probe in probes} == {"http"}
    with server.client(headers={"host": "10.1.2.3:1919"}) as client:  # a kubelet sends the pod's address
        assert [client.get(path).status_code for path in paths] == [200] * 4
        assert client.get("/v1/models").status_code == 401


def metric_names(server: ServerProcess) -> set[str]:
    with server.client() as client:
        text = client.get("/metrics").text
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def queries(value: Any) -> Iterator[str]:
    """All PromQL expressions under the key `expr`."""
    if isinstance(value, dict):
        if isinstance(value.get("expr"), str):
            yield value["expr"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from queries(inner)


def test_dashboard_and_rules_ask_for_metrics_that_exist(server: ServerProcess) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
    groups = [rule for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in groups if "record" in rule}
    exported = metric_names(server) | recorded
    for expressions in (list(queries(dashboard)), list(queries(rules))):
        assert len(expressions) > 5
        for expression in expressions:
            names = METRIC.findall(expression)
            assert names and not set(names) - exported, f"{expression}: {set(names) - exported}"
            assert expression.count("(") == expression.count(")")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert all({"summary", "description"} <= r["annotations"].keys() for r in groups if "alert" in r)
