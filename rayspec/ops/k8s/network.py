"""The network policy of a Ray cluster: allowed connections of its pods; all others are dropped."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.pods import AGENT_PORT, MONITORING_PORTS, PORTS, WORKER_PORTS, Manifest, labels

# Ports that the system chooses (net.ipv4.ip_local_port_range): raylets, our own transport, NCCL.
_CHOSEN_PORTS = (32768, 60999)
_OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
_DNS = (
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
    {"ipBlock": {"cidr": "169.254.20.10/32"}},  # NodeLocal DNSCache
)
_METADATA_SERVICES = "169.254.0.0/16"  # of clouds, which hand out a node's credentials


def network_policy(options: RenderOptions) -> Manifest:
    """Return the policy of all pods of the render. Between these pods, the ports of Ray and rayspec are open. From
    outside, KubeRay's operator, Prometheus and, for a service, the pods of its namespace may connect. To outside, DNS,
    HTTPS and the Redis of the options are open."""
    inside = {"podSelector": {"matchLabels": labels(options)}}
    ingress = [
        {"from": [inside], "ports": _inside_ports()},
        {
            "from": [
                {
                    "namespaceSelector": {"matchLabels": _in_namespace(options.operator_namespace)},
                    "podSelector": {"matchLabels": _OPERATOR},
                }
            ],
            "ports": [_port("dashboard"), _port("serve")],
        },
        {
            "from": [{"namespaceSelector": {"matchLabels": _in_namespace(options.monitoring_namespace)}}],
            "ports": [_port(name) for name in ("metrics", *MONITORING_PORTS)],
        },
    ]
    if options.kind == "service":
        ingress.append({"from": [{"podSelector": {}}], "ports": [_port("serve")]})
    egress = [
        {"to": [inside], "ports": _inside_ports()},
        {"to": list(_DNS), "ports": [_number(53, "UDP"), _number(53)]},
        {"to": [_anywhere()], "ports": [_number(port) for port in _outside_ports(options)]},
    ]
    if options.redis_address is not None:
        host, _, port = options.redis_address.rpartition(":")
        egress.append({"to": [_redis_peer(host)], "ports": [_number(int(port))]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": options.name, "labels": labels(options)},
        "spec": {
            "podSelector": {"matchLabels": labels(options)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _inside_ports() -> list[Manifest]:
    named = [_port(name) for name in PORTS]
    return [*named, _number(AGENT_PORT), _range(*WORKER_PORTS), _range(*_CHOSEN_PORTS)]


def _outside_ports(options: RenderOptions) -> tuple[int, ...]:
    """Return the port of HTTPS, for the Hub and buckets; with an autoscaler, also 6443, a port of the API server."""
    return (443, 6443) if options.autoscales else (443,)


def _redis_peer(host: str) -> Manifest:
    """Return the peer that stands for a Redis host, because a policy cannot name a host. An IP address stands for
    itself. A service of the cluster (SERVICE, SERVICE.NAMESPACE or SERVICE.NAMESPACE.svc...) becomes the pods of its
    namespace. Any other name becomes all outside addresses."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}
    _, *namespace = host.split(".")
    if len(namespace) > 1 and namespace[1] != "svc":
        return _anywhere()
    pods: Manifest = {"podSelector": {}}
    if namespace:
        pods["namespaceSelector"] = {"matchLabels": _in_namespace(namespace[0])}
    return pods


def _anywhere() -> Manifest:
    return {"ipBlock": {"cidr": "0.0.0.0/0", "except": [_METADATA_SERVICES]}}


def _in_namespace(name: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name}


def _port(name: str) -> dict[str, Any]:
    return {"port": name, "protocol": "TCP"}


def _number(port: int, protocol: str = "TCP") -> dict[str, Any]:
    return {"port": port, "protocol": protocol}


def _range(first: int, last: int) -> dict[str, Any]:
    return {"port": first, "endPort": last, "protocol": "TCP"}
