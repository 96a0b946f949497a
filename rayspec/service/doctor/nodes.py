"""What runs on the nodes of a cluster to look at them: a task that tells of its node, and a peer that others call."""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import distributed

from rayspec.config import EngineConfig
from rayspec.model.fingerprint import weights_fingerprint
from rayspec.pipeline.tensor_parallel import RankGroup, free_address
from rayspec.pipeline.transport import node_address
from rayspec.service.doctor.findings import Finding
from rayspec.service.doctor.gpus import Gpus, look_at_gpus
from rayspec.service.doctor.machine import (
    check_memory,
    check_open_files,
    check_packages,
    check_ray_folder,
    check_shared_memory,
    installed_version,
)
from rayspec.service.doctor.model_files import ModelFiles, look_at_model

_PACKAGES = ("rayspec", "ray", "torch", "transformers")
_CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """versions: of Python and of what must be the same everywhere. findings: of the node by itself. model: None where
    none was asked about; fingerprint: of its weights, "" where they cannot be read."""

    address: str
    versions: Mapping[str, str]
    gpus: Gpus
    findings: tuple[Finding, ...]
    model: ModelFiles | None
    fingerprint: str


def tell_of_node(model: str | None) -> NodeFacts:
    """On the node itself."""
    files = look_at_model(model) if model is not None else None
    readable = files is not None and files.folder is not None and not files.errors
    return NodeFacts(
        address=node_address(),
        versions={"python": platform.python_version()} | {name: installed_version(name) or "-" for name in _PACKAGES},
        gpus=look_at_gpus(hidden_too=True),
        findings=(check_packages(), check_memory(), check_shared_memory(), check_ray_folder(), check_open_files()),
        model=files,
        fingerprint=weights_fingerprint(EngineConfig(model=str(files.folder))) if files and readable else "",
    )


class Peer:
    """Listens at its node's address, at a port that the system chooses, and calls others.

    It says again what it is told by whoever knows the secret, so that nothing else is taken for a peer.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        host = node_address()
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._place: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._answer, daemon=True).start()

    def where(self) -> tuple[str, int]:
        return self._place

    def call(self, place: tuple[str, int]) -> float | str:
        """Seconds there and back, or why it did not get through."""
        nonce = secrets.token_bytes(16)
        try:
            with socket.create_connection(place, timeout=_CALL_TIMEOUT_S) as line:
                started = time.perf_counter()
                line.sendall(self._secret + nonce)
                echo = _receive(line, len(nonce))
                return time.perf_counter() - started if echo == nonce else "something else answers there"
        except OSError as error:
            return str(error)

    def _answer(self) -> None:
        while True:
            line, _ = self._listener.accept()
            with line, contextlib.suppress(OSError):
                line.settimeout(_CALL_TIMEOUT_S)
                told = _receive(line, len(self._secret) + 16)
                if secrets.compare_digest(told[: len(self._secret)], self._secret):
                    line.sendall(told[len(self._secret) :])


class Rank:
    """One of the processes, a node each, that add up a number."""

    def meeting_place(self) -> str:
        return free_address(node_address())

    def add_up(self, rank: int, size: int, address: str, device: str, timeout_s: float) -> float:
        """The sum of 1, 2, ... over all ranks, by an all-reduce: of NCCL on "cuda", of gloo on "cpu". Raises what torch
        raises."""
        RankGroup(rank=rank, size=size, address=address, device=device).join(timeout_s)
        try:
            number = torch.full((1024,), float(rank + 1), device=device)
            distributed.all_reduce(number)
            return float(number.mean().item())
        finally:
            distributed.destroy_process_group()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _receive(line: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = line.recv(size - len(received))
        if not part:
            raise ConnectionError("the line was closed")
        received += part
    return received
