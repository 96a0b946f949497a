"""Checks of a Ray cluster: each node, the agreement between nodes, and the network between them.

What runs on the nodes imports torch and transformers only where it needs them.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayspec.config import EngineConfig
from rayspec.errors import counted
from rayspec.machine import installed_version
from rayspec.ops.doctor.machine import Finding, check_machine, check_model, ok, problem, skipped, warning
from rayspec.pipeline.placement import first_line
from rayspec.ray_session import require_listener

_NODE_TIMEOUT_S = 120.0
_PACKAGES = ("rayspec", "ray", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that Ray knows. num_gpus: GPUs that Ray counts on the node."""

    node_id: str
    name: str
    num_gpus: int

    @property
    def only(self) -> dict[str, Any]:
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node_id, soft=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts that a node reports about itself. versions: of Python and of packages that must be the same on all nodes.
    num_usable_gpus: by torch. findings: checks of this node alone. fingerprint: of the model's weights, "" if there are
    none to read."""

    versions: Mapping[str, str]
    num_usable_gpus: int = 0
    findings: tuple[Finding, ...] = ()
    fingerprint: str = ""


def describe_node(model: str | None) -> NodeFacts:
    findings, num_usable = check_machine(hidden_too=True)
    fingerprint = ""
    if model is not None:
        finding, place = check_model(model)
        findings.append(finding)
        if place is not None:
            from rayspec.model.weights import weights_fingerprint  # noqa: PLC0415

            fingerprint = weights_fingerprint(EngineConfig(model=place))
    return NodeFacts(
        versions={"python": platform.python_version()} | {name: installed_version(name) or "-" for name in _PACKAGES},
        num_usable_gpus=num_usable,
        findings=tuple(findings),
        fingerprint=fingerprint,
    )


class Peer:
    """An actor on a node, that exchanges tensors with others by the link that shards use."""

    def open(self) -> str:
        """Open a place on this node where peers can meet, and return its address."""
        from rayspec.pipeline.collective import Rendezvous, node_address  # noqa: PLC0415

        self._rendezvous = Rendezvous(node_address())
        return self._rendezvous.address

    def join(self, rank: int, size: int, address: str, backend: Literal["gloo", "nccl"]) -> None:
        """Exchange a tensor with every other rank. The link stays open, for others may not be done. Raises
        TransportError."""
        import torch  # noqa: PLC0415

        from rayspec.pipeline.collective import TensorLink, node_address  # noqa: PLC0415

        device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._link = TensorLink.join(
            rank=rank, size=size, address=address, host=node_address(), timeout_s=60.0, device=device
        )


def cluster_findings(address: str, model: str | None) -> list[Finding]:
    """Check the cluster at `address`, in the form of ray.init, or the cluster that this process is connected to."""
    is_ours = not ray.is_initialized()
    try:
        require_listener(address)
        if is_ours:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        return _findings(model)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        remedy = "start Ray there (ray start --head) in the versions of here, correct the address, or open its port"
        return [problem("cluster", f"{address}: {first_line(error)}", remedy)]
    finally:
        if is_ours:
            ray.shutdown()


def check_agreement(facts: Mapping[str, NodeFacts], *, with_model: bool = False) -> list[Finding]:
    """Check that all nodes have the same Python, Ray, torch, transformers and rayspec, and the same weights of a model.
    facts: by node."""
    findings = []
    for package in sorted({name for one in facts.values() for name in one.versions}):
        versions = {node: one.versions.get(package, "-") for node, one in facts.items()}
        remedy = "install the same version everywhere, best by the same image"
        findings.append(_same(f"{package} on all nodes", versions, remedy))
    prints = {node: one.fingerprint for node, one in facts.items()}
    if with_model and not any(prints.values()):
        findings.append(skipped("model on all nodes", "no node has its files"))
    elif with_model:
        remedy = "put the same files on every node, or the model on a volume that all of them mount"
        findings.append(_same("model on all nodes", prints, remedy))
    return findings


def _same(name: str, values: Mapping[str, str], remedy: str) -> Finding:
    where: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        where[value].append(node)
    if len(where) == 1:
        return ok(name, next(iter(where)))
    found = "; ".join(f"{value or 'none'} on {', '.join(nodes)}" for value, nodes in sorted(where.items()))
    return problem(name, found, remedy)


def check_counted_gpus(node: Node, usable: int) -> Finding:
    name, found = f"{node.name}: GPUs in Ray", f"Ray counts {node.num_gpus}, torch can use {usable}"
    if node.num_gpus == usable:
        return ok(name, found) if usable else skipped(name, "no GPU")
    limits = f"resources.limits of nvidia.com/gpu or amd.com/gpu: {usable}"
    remedy = f"ray start --num-gpus {usable} there; in Kubernetes, {limits}"
    if node.num_gpus > usable:
        return problem(name, found, remedy)
    return warning(name, found, f"{remedy}, unless some are meant for others")


def check_reach(nodes: Sequence[Node], backend: Literal["gloo", "nccl"]) -> Finding:
    """Check that every two nodes can exchange tensors, at ports that the system chooses, as shards do: by gloo over TCP
    between all nodes; by NCCL between one GPU of each node that has a free one."""
    by_nccl = backend == "nccl"
    name = "NCCL between nodes" if by_nccl else "nodes reach one another"
    having = [node for node in nodes if node.num_gpus > 0 or not by_nccl]
    if len(having) < 2:
        return skipped(name, "fewer than two nodes with GPUs" if by_nccl else "one node")
    peers: list[Any] = [ray.remote(Peer).options(**node.only, num_gpus=int(by_nccl)).remote() for node in having]
    try:
        places = _answers([peer.open.remote() for peer in peers])
        for node, place in zip(having, places, strict=True):
            if isinstance(place, Exception) and not (by_nccl and isinstance(place, TimeoutError)):
                return problem(name, f"{node.name}: {first_line(place)}", "is rayspec installed there?")
        # A peer that has got no GPU does not answer: others use them.
        ready = [at for at, place in enumerate(places) if not isinstance(place, Exception)]
        if len(ready) < 2:
            return skipped(name, f"of {len(having)} nodes with GPUs, {len(ready)} had a free one")
        having, place = [having[at] for at in ready], places[ready[0]]
        joining = enumerate(peers[at] for at in ready)
        answers = _answers([peer.join.remote(rank, len(ready), place, backend) for rank, peer in joining])
    finally:
        for peer in peers:
            ray.kill(peer)
    failed = [
        f"{node.name}: {first_line(answer)}"
        for node, answer in zip(having, answers, strict=True)
        if isinstance(answer, Exception)
    ]
    if not failed:
        return ok(name, f"every two of {len(having)} nodes exchange tensors")
    remedy = "open all TCP ports between the nodes (firewall, security group, network policy): shards choose theirs"
    if by_nccl:
        remedy = "NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME chooses the interface; or set data_plane to frames"
    return problem(name, "; ".join(failed), remedy)


def _findings(model: str | None) -> list[Finding]:
    alive = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
    addresses = Counter(each["NodeManagerAddress"] for each in alive)
    nodes = []
    for each in sorted(alive, key=itemgetter("NodeManagerAddress")):
        name = str(each["NodeManagerAddress"])
        name += f"#{each['NodeID'][:6]}" if addresses[name] > 1 else ""  # several nodes of one machine
        nodes.append(Node(node_id=str(each["NodeID"]), name=name, num_gpus=int(each["Resources"].get("GPU", 0))))
    describe = ray.remote(describe_node)
    answers = _answers([describe.options(**node.only, max_retries=0).remote(model) for node in nodes])
    findings = [ok("cluster", f"{counted(len(nodes), 'node')}, {counted(sum(node.num_gpus for node in nodes), 'GPU')}")]
    facts: dict[str, NodeFacts] = {}
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, Exception):
            remedy = "is rayspec installed there, in the environment that Ray was started in?"
            findings.append(problem(node.name, first_line(answer), remedy))
        else:
            facts[node.name] = answer
            findings += [replace(finding, name=f"{node.name}: {finding.name}") for finding in answer.findings]
            findings.append(check_counted_gpus(node, answer.num_usable_gpus))
    findings += check_agreement(facts, with_model=model is not None)
    reachable = [node for node in nodes if node.name in facts]
    return [*findings, check_reach(reachable, "gloo"), check_reach(reachable, "nccl")]


def _answers(references: Sequence[Any]) -> list[Any]:
    """Return the results in order, and an error for each that failed or does not arrive in time."""
    arrived = ray.wait(list(references), num_returns=len(references), timeout=_NODE_TIMEOUT_S)[0] if references else []
    found, late = list[Any](), TimeoutError(f"no answer within {_NODE_TIMEOUT_S:.0f} s")
    for reference in references:
        try:
            found.append(ray.get(reference) if reference in arrived else late)
        except RayError as error:  # noqa: PERF203 - one node may fail
            found.append(getattr(error, "cause", None) or error)
    return found
