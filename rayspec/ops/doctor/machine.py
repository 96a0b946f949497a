"""Findings, and checks of this machine and of a model's files, without torch and ray but for `check_dtype`. Arguments
of a check replace the values that it would measure. GPUs are looked at in processes of their own."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich import box
from rich.table import Table
from rich.text import Text

from rayspec import demo
from rayspec.errors import counted
from rayspec.machine import bytes_available, bytes_in_total, cpu_class, cpu_name, installed_version, num_cores
from rayspec.ops.plan.gpus import ask_torch
from rayspec.types import CheckpointError, RayspecError

_GIB = 2**30
_PACKAGE = "rayspec"
_SHARED = "/dev/shm"  # noqa: S108 - looked at only
_PCI, _NVIDIA, _AMD = "/sys/bus/pci/devices", "0x10de", "/dev/kfd"
_SHOWN_PACKAGES = ("rayspec", "torch", "transformers", "ray")
# Ray takes 30 % of the memory for its object store, but no more than a /dev/shm of 10 GB or more holds. It falls back
# to the disk where /dev/shm is smaller.
_STORE_SHARE, _LARGE_STORE = 0.3, 10**10
# At 95 % Ray puts no more objects on a disk.
_FULL, _NEARLY_FULL = 0.95, 0.9
# The path of a socket may have 107 characters, of which Ray's own part takes about 70.
_LONGEST_RAY_FOLDER = 35
_LEAST_MEMORY = 2 * _GIB
_FEW_FILES, _ENOUGH_FILES = 1024, 65536
_CUDA_BUILD = "install torch's build for CUDA"
_QUERY = ["--query-gpu=name,driver_version", "--format=csv,noheader"]

Status = Literal["ok", "warning", "problem", "skipped"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. found: the observed state. remedy: advice to the user; empty where none is needed."""

    status: Status
    name: str
    found: str
    remedy: str = ""


ok, warning, problem, skipped = (partial(Finding, status) for status in _STYLES)


def findings_table(findings: Sequence[Finding]) -> Table:
    counts = Counter(finding.status for finding in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
    table = Table(box=box.SIMPLE_HEAD, caption=summary, caption_justify="left")
    for heading in ("check", "status", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.name, status, Text(finding.found), Text(finding.remedy))
    return table


def check_packages(requirements: Iterable[str] | None = None) -> Finding:
    """Check that all requirements of rayspec are installed in suitable versions."""
    lacking = []
    for text in requirements if requirements is not None else metadata.requires(_PACKAGE) or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            version = installed_version(wanted.name)
            if version is None:
                lacking.append(f"{wanted.name} is missing")
            elif not wanted.specifier.contains(version, prereleases=True):
                lacking.append(f"{wanted.name} is {version}, not {wanted.specifier}")
    if lacking:
        return problem(
            "packages", "; ".join(lacking), "pip install --upgrade -c constraints.txt '.[all]' in rayspec's checkout"
        )
    shown = [f"{name} {installed_version(name) or 'is not installed'}" for name in _SHOWN_PACKAGES]
    return ok("packages", ", ".join([f"Python {platform.python_version()}", *shown]))


def check_cpu() -> Finding:
    """Name the processor, the cores that this process may use, and its instructions for matrix products."""
    return ok("CPU", f"{cpu_name()}, {counted(num_cores(), 'core')}, {cpu_class()}")


def check_memory(bytes_free: int | None = None) -> Finding:
    free = bytes_available() if bytes_free is None else bytes_free
    found = f"{free / _GIB:.1f} GiB free"
    if free >= _LEAST_MEMORY:
        return ok("memory", found)
    return warning("memory", found, "end what else runs here, or give the container more: Ray alone takes about 1 GiB")


def object_store_bytes(memory: int) -> int:
    """Return what Ray takes for its object store by default, on a machine with so much memory and a small /dev/shm."""
    return min(int(_STORE_SHARE * memory), _LARGE_STORE)


def check_shared_memory(num_bytes: int | None = None, memory: int | None = None) -> Finding:
    there = shutil.disk_usage(_SHARED).total if Path(_SHARED).exists() else 0
    size = there if num_bytes is None else num_bytes
    store = object_store_bytes(bytes_in_total() if memory is None else memory)
    found = f"{_SHARED} has {size / _GIB:.1f} GiB"
    if size >= store:
        return ok("shared memory", found)
    return warning(
        "shared memory",
        f"{found}, and Ray's object store wants {store / _GIB:.1f} and would use the disk",
        f"docker run --shm-size; in Kubernetes, an emptyDir with medium: Memory at {_SHARED}; or ray start "
        "--object-store-memory",
    )


def check_ray_folder(folder: str | None = None, *, used: float | None = None, writable: bool | None = None) -> Finding:
    """Check the folder where Ray keeps sockets, logs and objects that do not fit the memory. used: share of its disk. A
    missing folder stands for its nearest existing parent."""
    place = folder or os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    existing = Path(place).absolute()
    while not existing.exists():
        existing = existing.parent
    if used is None:
        usage = shutil.disk_usage(existing)
        used = 1 - usage.free / usage.total
    if not (os.access(existing, os.W_OK) if writable is None else writable):
        return problem("Ray's folder", f"{place}, which cannot be written", "RAY_TMPDIR with a folder that can be")
    found = f"{place}, whose disk is {used:.0%} full"
    if len(place) > _LONGEST_RAY_FOLDER:
        remedy = f"RAY_TMPDIR with a path of at most {_LONGEST_RAY_FOLDER} characters: those of sockets are limited"
        return problem("Ray's folder", f"{found}; the path has {len(place)} characters", remedy)
    remedy = "free some space, or set RAY_TMPDIR to a folder on another disk"
    if used >= _FULL:
        return problem("Ray's folder", found, f"{remedy}: Ray puts no objects there any more")
    if used >= _NEARLY_FULL:
        return warning("Ray's folder", found, f"{remedy}: at {_FULL:.0%} Ray puts no objects there any more")
    return ok("Ray's folder", found)


def check_open_files(limit: int | None = None) -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    found = f"{soft} at once"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else found)
    remedy = f"ulimit -n {_ENOUGH_FILES}, before Ray is started"
    if soft < _FEW_FILES:
        return problem("open files", found, f"{remedy}: Ray cannot run with so few")
    return warning("open files", found, f"{remedy}: large clusters need more")


def check_gpus(*, hidden_too: bool = False) -> tuple[Finding, int]:
    """Check that torch can use all GPUs of the driver, and includes NCCL. Return also how many it can use. hidden_too:
    include GPUs that CUDA_VISIBLE_DEVICES hides; Ray sets that variable in tasks that reserve no GPU."""
    smi = shutil.which("nvidia-smi")
    if Path(_AMD).exists() and not (smi and _may_have_gpu()):
        return _check_amd_gpus(hidden_too=hidden_too)
    return (skipped("GPUs", "no GPU"), 0) if smi is None else _check_nvidia_gpus(smi, hidden_too=hidden_too)


def _check_nvidia_gpus(smi: str, *, hidden_too: bool) -> tuple[Finding, int]:
    try:
        done = subprocess.run(  # noqa: S603 - nvidia-smi as found on PATH
            [smi, *_QUERY], capture_output=True, text=True, check=True, timeout=60.0
        )
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "reinstall the NVIDIA driver; in a container, its toolkit and --gpus all"
        broken = problem("GPUs", f"nvidia-smi: {_reason(error)}", remedy)
        # Images of clouds have the driver on every machine.
        return broken if _may_have_gpu() else skipped("GPUs", "no GPU"), 0
    rows = [line.partition(", ") for line in done.stdout.splitlines() if line.strip()]
    if not rows:
        return skipped("GPUs", "no GPU"), 0
    found = f"{len(rows)} x {'/'.join(dict.fromkeys(name for name, _, _ in rows))}, driver {rows[0][2]}"
    try:
        told = ask_torch(hidden_too=hidden_too)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return problem("GPUs", f"{found}; torch: {_reason(error)}", _CUDA_BUILD), 0
    num_usable, cuda = len(told["names"]), told["cuda"]
    if cuda is None:
        finding = problem("GPUs", f"{found}; torch {told['torch']} is a build for the CPU", _CUDA_BUILD)
        return finding, num_usable
    found += f", torch {told['torch']} for CUDA {cuda}"
    if not num_usable:
        remedy = f"update the driver to one for CUDA {cuda}, or install torch for an older CUDA"
        finding = problem("GPUs", f"{found}, which can use none of them", f"{remedy}; unset CUDA_VISIBLE_DEVICES")
    elif num_usable < len(rows):
        found += f", which sees {num_usable} of them"
        finding = warning("GPUs", found, "unset CUDA_VISIBLE_DEVICES, unless it is meant")
    elif not told["has_nccl"]:
        finding = problem("GPUs", f"{found}, without NCCL", f"{_CUDA_BUILD}: shards on GPUs need NCCL")
    else:
        finding = ok("GPUs", found)
    return finding, num_usable


def _check_amd_gpus(*, hidden_too: bool) -> tuple[Finding, int]:
    remedy = "install torch's build for ROCm, unless the GPU is meant for something else"
    try:
        answer = ask_torch(hidden_too=hidden_too)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return warning("GPUs", f"a driver of AMD; torch: {_reason(error)}", remedy), 0
    names, rocm = answer["names"], answer["rocm"]
    if not names or not rocm:
        remedy = "unset HIP_VISIBLE_DEVICES, or update the driver" if rocm else remedy
        return warning("GPUs", f"a driver of AMD, of which torch {answer['torch']} can use no GPU", remedy), 0
    found = f"{len(names)} x {'/'.join(dict.fromkeys(names))}, torch {answer['torch']} for ROCm {rocm}"
    if answer["has_nccl"]:
        return ok("GPUs", found), len(names)
    return problem("GPUs", f"{found}, without RCCL", f"{remedy}: shards on GPUs need RCCL"), len(names)


def _may_have_gpu() -> bool:
    """Return whether the PCI bus has a device of NVIDIA. Return True where it cannot be seen."""
    devices = Path(_PCI)
    vendors = (file.read_text(encoding="ascii").strip() for file in devices.glob("*/vendor"))
    return not devices.is_dir() or Path("/dev/dxg").exists() or _NVIDIA in vendors  # dxg: of Windows


def _reason(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next((line for line in reversed(str(said).splitlines()) if line.strip()), type(error).__name__)


def check_machine(*, hidden_too: bool = False) -> tuple[list[Finding], int]:
    """Run the checks that need neither torch nor ray. Return also how many GPUs torch can use, see `check_gpus`."""
    checks = (check_packages, check_cpu, check_memory, check_shared_memory, check_ray_folder, check_open_files)
    gpus, num_usable = check_gpus(hidden_too=hidden_too)
    return [*(check() for check in checks), gpus], num_usable


def check_dtype() -> Finding:
    """Say which data type `dtype: auto` takes on this CPU, by the measurement that decides it."""
    import torch  # noqa: PLC0415 - other checks need not wait for torch and transformers

    from rayspec.model.weights import CLEARLY_FASTER, gain_of_float32  # noqa: PLC0415

    gain = gain_of_float32(torch.bfloat16)
    taken = "float32, if the memory allows" if gain >= CLEARLY_FASTER else "the checkpoint's data type"
    return ok("dtype on the CPU", f"float32 is {gain:.1f} times as fast as bfloat16: dtype auto takes {taken}")


_MODEL_FILES, _FETCH = "model files", "fetch the model again"
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model(model: str) -> tuple[Finding, str | None]:
    """Check the files of a model: a folder, also of an adapter that names its base model, a GGUF file, a hub id, or
    "demo". Return also where it can be loaded from, None if its files are absent or damaged."""
    # The hub's client takes a second to import.
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    from rayspec.model.sources import base_model, check_name, gguf_at, gguf_of_hub  # noqa: PLC0415

    try:
        check_name(model)
        model, _ = base_model(model) or (model, None)
        place = Path(demo.local_path(model))
        gguf = gguf_at(place)
    except RayspecError as error:
        return problem(_MODEL_FILES, str(error), "name another model"), None
    if not place.exists():
        of_hub = gguf_of_hub(model)
        try:
            cached = try_to_load_from_cache(*of_hub) if of_hub else snapshot_download(model, local_files_only=True)
        except LocalEntryNotFoundError:
            cached = None
        if not isinstance(cached, str):
            cache = Path(HF_HUB_CACHE)
            free = shutil.disk_usage(next(one for one in (cache, *cache.parents) if one.exists())).free / _GIB
            said = f"{model} is neither a folder here nor in the hub's cache; {free:.1f} GiB free"
            fetched = " ".join(of_hub) if of_hub else model
            remedy = f"nothing, if the hub can be reached when it is first loaded; otherwise: hf download {fetched}"
            return warning(_MODEL_FILES, said, remedy), None
        place = Path(cached)
        gguf = place if of_hub else None
    is_gguf = gguf is not None
    weights = [gguf] if gguf else next(filter(None, (sorted(place.glob(kind)) for kind in _WEIGHTS)), [])
    errors = [] if is_gguf or (place / "config.json").exists() else ["no config.json"]
    headers = [] if is_gguf else sorted([*place.glob("config.json"), *place.glob("*.index.json")])
    errors += [error for file in (*headers, *weights) for error in _errors_of(file)]
    errors += [] if weights else [f"no weights ({' or '.join(_WEIGHTS)})"]
    if errors:
        return problem(_MODEL_FILES, f"{place}: {'; '.join(errors)}", _FETCH), None
    found = f"{place}, {sum(path.stat().st_size for path in weights) / _GIB:.2f} GiB of weights"
    if not is_gguf and not any((place / name).exists() for name in _TOKENIZERS):
        return warning(_MODEL_FILES, f"{found}; no tokenizer", "name one with the option 'tokenizer'"), str(place)
    return ok(_MODEL_FILES, found), str(place)


def check_weights(model: str) -> list[Finding]:
    """Say what becomes of the weights of a quantised checkpoint. model: where its files are."""
    from rayspec.config import EngineConfig  # noqa: PLC0415 - they bring torch and transformers
    from rayspec.model.weights import load_config, resolve_device, route_of_weights  # noqa: PLC0415

    config = EngineConfig(model=model)
    try:
        on_cpu = resolve_device(config.device).type == "cpu"
        route = route_of_weights(config, load_config(config), on_cpu=on_cpu)
    except RayspecError as error:
        return [warning("model config", str(error), "the options 'trust_remote_code' or 'model', as the message says")]
    return [ok("quantised weights", route)] if route else []


def _errors_of(file: Path) -> list[str]:
    """Return what is wrong with a config, with an index of weights or the files that it names, or with a file of
    weights. The header of safetensors gives the file's length."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    from rayspec.model.sources import missing_files  # noqa: PLC0415

    try:
        if file.name == "config.json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".json":
            return [f"{name} is missing" for name in missing_files(file)]
        elif file.suffix == ".gguf":
            with file.open("rb") as opened:
                return [] if opened.read(4) == b"GGUF" else [f"{file.name} is no GGUF file"]
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):
                pass
        elif not file.stat().st_size:
            return [f"{file.name} is empty"]
    except CheckpointError as error:
        return [str(error)]
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        return [f"{file.name} cannot be read: {error!r}"]
    return []
