"""Checks of a Ray cluster: each node, the agreement between nodes, and the network between them."""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayspec.ops.doctor.findings import Finding, ok, problem, skipped, warning
from rayspec.ops.doctor.gpus import check_gpus, check_nccl
from rayspec.ops.doctor.model_files import check_model
from rayspec.ops.doctor.nodes import NodeFacts, describe_node
from rayspec.ops.doctor.peers import Peer
from rayspec.ops.doctor.ranks import Rank
from rayspec.pipeline.placement import discard

_NODE_TIMEOUT_S = 120.0
_ALL_REDUCE_TIMEOUT_S = 60.0
_SLOW_S = 0.01  # of a round trip
_CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that Ray knows. num_gpus: GPUs that Ray counts on the node."""

    node_id: str
    name: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a node, or something on it, gave no answer."""

    reason: str


def cluster_findings(address: str, model: str | None) -> list[Finding]:
    """Check the cluster at `address`, in the form of ray.init, or the cluster that this process is connected to."""
    if not _listens(address):
        remedy = "start Ray there (ray start --head), name another address, or open the port between here and there"
        return [problem("cluster", f"nothing answers at {address}", remedy)]
    try:
        with _attached(address):
            return _findings(alive_nodes(), model)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        return [
            problem("cluster", f"{address}: {_first_line(error)}", "is it running, and the same Ray and Python here?")
        ]


def alive_nodes() -> list[Node]:
    """Return the nodes that are alive, named by address and, if needed, a number. Ray must be initialised."""
    alive = sorted((each for each in _ray_nodes() if each["Alive"]), key=itemgetter("NodeManagerAddress"))
    num_alike = Counter(each["NodeManagerAddress"] for each in alive)
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def name(address: str) -> str:
        return address if num_alike[address] == 1 else f"{address}#{next(numbers[address])}"

    return [
        Node(
            node_id=str(each["NodeID"]),
            name=name(str(each["NodeManagerAddress"])),
            num_gpus=int(each["Resources"].get("GPU", 0)),
        )
        for each in alive
    ]


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def check_agreement(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Check that all nodes have the same Python, Ray, torch, transformers and rayspec. facts: by node."""
    findings = []
    for package in sorted({name for one in facts.values() for name in one.versions}):
        where = _nodes_by({node: one.versions.get(package, "-") for node, one in facts.items()})
        name = f"{package} on all nodes"
        if len(where) == 1:
            findings.append(ok(name, next(iter(where))))
        else:
            found = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in sorted(where.items()))
            findings.append(problem(name, found, "install the same version everywhere, best by the same image"))
    return findings


def check_counted_gpus(node: Node, facts: NodeFacts) -> Finding:
    """Compare the number of GPUs that Ray counts with the number that torch can use."""
    usable = facts.gpus.num_usable
    if node.num_gpus == 0 and usable == 0:
        return skipped(f"{node.name}: GPUs in Ray", "no GPU")
    found = f"Ray counts {node.num_gpus}, torch can use {usable}"
    if node.num_gpus == usable:
        return ok(f"{node.name}: GPUs in Ray", found)
    remedy = f"ray start --num-gpus {usable} there; in Kubernetes, resources.limits of nvidia.com/gpu: {usable}"
    if node.num_gpus > usable:
        return problem(f"{node.name}: GPUs in Ray", found, remedy)
    return warning(f"{node.name}: GPUs in Ray", found, f"{remedy}, unless some are meant for others")


def check_fingerprints(facts: Mapping[str, NodeFacts]) -> Finding:
    """Check that all nodes have the same weights."""
    where = _nodes_by({node: one.fingerprint for node, one in facts.items()})
    name = "model on all nodes"
    if not any(where):
        return skipped(name, "no node has its files")
    if len(where) == 1:
        return ok(name, f"fingerprint {next(iter(where))}")
    found = "; ".join(f"{print_ or 'none'} on {', '.join(nodes)}" for print_, nodes in sorted(where.items()))
    return problem(name, found, "put the same files on every node, or the model on a volume that all of them mount")


def _nodes_by(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the nodes that have each value. values: by node."""
    where: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        where[value].append(node)
    return where


def check_reach(nodes: Sequence[Node]) -> Finding:
    """Check TCP from every node to every other node, at ports that the system chooses, as for shards."""
    name = "nodes reach one another"
    if len(nodes) < 2:
        return skipped(name, "one node")
    secret = secrets.token_bytes(32)
    peers = {node.name: _pinned(Peer, node, secret) for node in nodes}
    try:
        places = _answers({node: peer.where.remote() for node, peer in peers.items()})
        calls = {
            (here, there): peers[here].call.remote(place)
            for here, there in itertools.permutations(peers, 2)
            if not isinstance(places[here], NoAnswer) and not isinstance(place := places[there], NoAnswer)
        }
        took = _answers(calls)
    finally:
        for peer in peers.values():
            discard(peer)
    failed = [f"{node}: {silent.reason}" for node, silent in places.items() if isinstance(silent, NoAnswer)]
    failed += [
        f"{here} to {there}: {answer.reason if isinstance(answer, NoAnswer) else answer}"
        for (here, there), answer in took.items()
        if not isinstance(answer, float)
    ]
    if failed:
        remedy = "open all TCP ports between the nodes (firewall, security group, network policy): shards choose theirs"
        return problem(name, "; ".join(failed), remedy)
    slowest = max(took.values())
    found = f"{len(took)} ways, there and back in at most {1000 * slowest:.2f} ms"
    if slowest > _SLOW_S:
        return warning(name, found, "a pipeline over such a network waits; keep a replica's stages on near nodes")
    return ok(name, found)


def check_all_reduce(nodes: Sequence[Node], *, device: str = "cuda") -> Finding:
    """Check a sum over one process per node: by NCCL with one GPU each or, on "cpu", by gloo."""
    backend, num_gpus = ("NCCL", 1.0) if device == "cuda" else ("gloo", 0.0)
    name = f"{backend} between nodes"
    having = [node for node in nodes if node.num_gpus > 0 or device == "cpu"]
    if len(having) < 2:
        return skipped(name, "fewer than two nodes with GPUs" if having else "no GPU")
    ranks = [_pinned(Rank, node, num_gpus=num_gpus) for node in having]
    try:
        (place,) = _answers({"place": ranks[0].meeting_place.remote()}).values()
        if isinstance(place, NoAnswer):
            return warning(name, f"{having[0].name}: {place.reason}", "try again when its GPUs are free")
        size = len(ranks)
        sums = _answers(
            {
                node.name: rank.add_up.remote(index, size, place, device, _ALL_REDUCE_TIMEOUT_S)
                for index, (node, rank) in enumerate(zip(having, ranks, strict=True))
            }
        )
    finally:
        for rank in ranks:
            discard(rank)
    wrong = [
        f"{node}: {answer.reason if isinstance(answer, NoAnswer) else f'the sum is {answer}'}"
        for node, answer in sums.items()
        if answer != size * (size + 1) / 2
    ]
    if wrong:
        remedy = "NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME chooses the interface; or set data_plane to frames"
        return problem(name, "; ".join(wrong), remedy)
    return ok(name, f"an all-reduce over {size} nodes is right")


def _findings(nodes: Sequence[Node], model: str | None) -> list[Finding]:
    received = _answers({node.name: _task(describe_node, node, model) for node in nodes})
    facts = {name: one for name, one in received.items() if not isinstance(one, NoAnswer)}
    findings = [ok("cluster", f"{len(nodes)} nodes, {sum(node.num_gpus for node in nodes)} GPUs")]
    for node in nodes:
        one = received[node.name]
        if isinstance(one, NoAnswer):
            remedy = "is rayspec installed there, in the environment that Ray was started in?"
            findings.append(problem(node.name, one.reason, remedy))
        else:
            findings += _of_node(node, one)
    findings += check_agreement(facts)
    findings += [check_fingerprints(facts)] if model is not None else []
    reachable = [node for node in nodes if node.name in facts]
    return [*findings, check_reach(reachable), check_all_reduce(reachable)]


def _of_node(node: Node, facts: NodeFacts) -> Iterator[Finding]:
    own = [*facts.findings, check_gpus(facts.gpus), check_nccl(facts.gpus)]
    own += [check_model(facts.model)] if facts.model is not None else []
    for finding in own:
        yield replace(finding, name=f"{node.name}: {finding.name}")
    yield check_counted_gpus(node, facts)


def _listens(address: str) -> bool:
    """Return whether the address accepts connections; Ray itself would try for half a minute. True without a port."""
    place = urlsplit(address if "//" in address else f"//{address}")
    if place.hostname is None or place.port is None:
        return True
    try:
        socket.create_connection((place.hostname, place.port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _attached(address: str) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        yield
    finally:
        ray.shutdown()


def _affinity(node: Node) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node.node_id, soft=False)


def _task(function: Callable[..., object], node: Node, *arguments: object) -> Any:
    return (
        ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=_affinity(node)).remote(*arguments)
    )


def _pinned(kind: type, node: Node, *arguments: object, num_gpus: float = 0.0) -> Any:
    options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": _affinity(node)}
    return ray.remote(kind).options(**options).remote(*arguments)


def _answers(references: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the results that arrive in time, by the same keys, and `NoAnswer` for the rest."""
    waiting = list(references.values())
    arrived = set(ray.wait(waiting, num_returns=len(waiting), timeout=_NODE_TIMEOUT_S)[0]) if waiting else set()
    found: dict[Any, Any] = {}
    for key, reference in references.items():
        if reference not in arrived:
            found[key] = NoAnswer(f"no answer within {_NODE_TIMEOUT_S:.0f} s")
            continue
        try:
            found[key] = ray.get(reference)
        except RayError as error:
            found[key] = NoAnswer(_first_line(getattr(error, "cause", None) or error))
    return found


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
