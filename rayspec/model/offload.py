"""Offloading for models that do not fit the device: chosen sublayers fetch their weights from CPU memory or disk.
docs/tried.md says why accelerate and DeepSpeed do not serve here."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from rayspec.model.sublayers import Decomposition, Sublayer
from rayspec.types import CheckpointError, ConfigError, UnsupportedModelError

_CACHE_LINE = 64
_PAGE = 4096  # direct I/O needs addresses, offsets and lengths that are multiples of it
_HUGE_PAGE = 2 << 20
_MADV_PAGEOUT = 21  # <linux/mman.h>
_NUM_REPEATS = 3


@torch.inference_mode(False)
def offload(
    parts: Decomposition,
    sublayers: Collection[int],
    *,
    to: Literal["cpu", "disk"],
    device: torch.device | None = None,
    folder: Path | None = None,
) -> OffloadedWeights:
    """Move the weights of these sublayers, blocks and norms, off the device.

    From then on a sublayer fetches its weights whenever it runs, into buffers that the offloaded sublayers share: the
    device holds the weights of at most two. Bytes and alignment stay the same, so results are bit-equal. Weights that
    others use too stay on the device. Between its runs, the parameters of an offloaded sublayer hold the weights of
    another sublayer: do not read, save or move them.

    device: where the sublayers run, by default where the model is. to: "cpu" needs a CUDA device. "disk" is a nameless
    file in `folder`, by default the system's folder for temporary files. It vanishes with the process, even after a
    crash, and reads bypass the page cache if the file system allows it.

    Raises ConfigError for a place that cannot hold the weights, UnsupportedModelError for weights that are not plain
    tensors; the model is then unchanged.
    """
    device = parts.device if device is None else device
    if to == "cpu" and device.type == "cpu":
        raise ConfigError("option 'to' is 'cpu', where the model runs already: use disk, or a CUDA device")
    chosen = [sublayer for sublayer in parts.sublayers if sublayer.index in sublayers]
    for sublayer in chosen:
        weights = [weight for module in sublayer.modules for weight in module.parameters()]
        if any(type(each) is not nn.Parameter or type(each.data) is not Tensor for each in weights):
            raise UnsupportedModelError(
                f"{parts.config.model_type}: weights of sublayer {sublayer.index} are quantized or sharded, not "
                "plain tensors, and cannot be offloaded: load the model without quantization_config"
            )
    layouts = {sublayer.index: _ImageLayout.of(parts, sublayer) for sublayer in chosen}
    largest = max((layout.num_bytes for layout in layouts.values()), default=0)
    num_hosts = 2 if to == "disk" and len(layouts) > 1 else 1  # read into one while the other is in use
    is_pinned = to == "disk" and device.type == "cuda"  # torch never gives pinned memory back
    hosts = [_page_aligned(largest, pinned=is_pinned) for _ in range(num_hosts)]
    destinations = hosts if device.type == "cpu" else [torch.empty(largest, dtype=torch.uint8, device=device)]
    store = _DiskStore(folder, sum(layout.num_bytes for layout in layouts.values())) if to == "disk" else _HostStore()
    places: dict[int, Tensor] = {}
    for number, (index, layout) in enumerate(layouts.items()):
        places[index] = destinations[number % len(destinations)][: layout.num_bytes]
        image = hosts[number % len(hosts)][: layout.num_bytes]
        for parameter, view in layout.views_in(image):
            view.copy_(parameter.data)
        store.put(index, image)
    offloaded = OffloadedWeights(parts.sublayers, store, places)
    for index, layout in layouts.items():
        for parameter, view in layout.views_in(places[index]):
            _page_out(parameter.data)
            parameter.data = view
        layout.entrance.register_forward_pre_hook(Fetch(offloaded, index))
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))  # malloc keeps freed blocks unless they were large
    return offloaded


class OffloadedWeights:
    """The offloaded weights of a model or span. The sublayers' hooks call `fetch`."""

    def __init__(
        self, sublayers: Sequence[Sublayer], store: _HostStore | _DiskStore, places: dict[int, Tensor]
    ) -> None:
        self._indices = [sublayer.index for sublayer in sublayers]
        self._store = store
        self._places = places
        self._paused = False

    @property
    def sublayers(self) -> tuple[int, ...]:
        """Indices of the offloaded sublayers, in order."""
        return tuple(self._places)

    def fetch(self, index: int) -> None:
        """Copy the weights of sublayer `index` to the device. Raises CheckpointError if they cannot be read back."""
        if not self._paused:
            self._store.get(index, self._places[index])

    def transfer_seconds(self) -> tuple[float, ...]:
        """Measure the seconds to fetch the weights of each sublayer of the model or span, the fastest of a few.

        Sublayers on the device take 0. The result is for `LatencyModel.transfer_s`. No fetch is cached, so a run costs
        the same time, less the part that is read ahead.
        """
        seconds = dict.fromkeys(self._indices, 0.0)
        for index, place in self._places.items():
            self.fetch(index)  # not measured: these weights may have been read ahead
            times = []
            for _ in range(_NUM_REPEATS):
                _synchronise(place.device)
                started = time.perf_counter()
                self.fetch(index)
                _synchronise(place.device)
                times.append(time.perf_counter() - started)
            seconds[index] = min(times)
        return tuple(seconds.values())

    @contextmanager
    def without_transfers(self) -> Iterator[None]:
        """Let sublayers compute without fetches, on wrong weights, to measure computation without transfers."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Forward pre-hook that fetches an offloaded sublayer's weights, on its first module with such weights."""

    weights: OffloadedWeights
    index: int

    def __call__(self, module: nn.Module, arguments: tuple[object, ...]) -> None:
        self.weights.fetch(self.index)


@dataclass(frozen=True, slots=True)
class _ImageLayout:
    """The weights that one sublayer fetches, as one byte image of all its parameters. offsets: of each parameter in the
    image. entrance: the module before which they are fetched."""

    entrance: nn.Module
    offsets: Sequence[tuple[nn.Parameter, int]]
    num_bytes: int

    @classmethod
    def of(cls, parts: Decomposition, sublayer: Sublayer) -> _ImageLayout:
        ends = (parts.embedding, parts.rotary, parts.final_norm, parts.lm_head)
        others = [
            *(module for other in parts.sublayers if other is not sublayer for module in other.modules),
            *(module for module in ends if module is not None),
        ]
        elsewhere = {id(parameter) for module in others for parameter in module.parameters()}
        modules = sublayer.modules
        entrance, end = modules[-1], 0
        offsets: list[tuple[nn.Parameter, int]] = []
        for module in reversed(modules):
            own = [parameter for parameter in module.parameters() if id(parameter) not in elsewhere]
            if own:
                entrance = module
            for parameter in own:
                # The offset of a row in its cache line decides the order in which CPU kernels sum it.
                offset = _round_up(end, _CACHE_LINE) + parameter.data_ptr() % _CACHE_LINE
                offsets.append((parameter, offset))
                end = offset + parameter.nbytes
        return cls(entrance, offsets, _round_up(end, _PAGE))

    def views_in(self, image: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its tensor as a view in `image`, [num_bytes] uint8."""
        for parameter, offset in self.offsets:
            view = image[offset : offset + parameter.nbytes]
            yield parameter, view.view(parameter.dtype).view(parameter.shape)


class _HostStore:
    """Keeps the images of offloaded sublayers, [num_bytes] uint8, in pinned CPU memory. Copies and kernels are in one
    stream. A copy therefore waits for the kernels that still use the old weights, and later kernels wait for the copy.
    """

    def __init__(self) -> None:
        self._images: dict[int, Sequence[Tensor]] = {}

    def put(self, index: int, image: Tensor) -> None:
        # torch rounds pinned memory up to powers of two, so an image in one block could take twice its size.
        sizes = [1 << bit for bit in range(len(image).bit_length()) if len(image) >> bit & 1]
        self._images[index] = [torch.empty_like(one, pin_memory=True).copy_(one) for one in torch.split(image, sizes)]

    def get(self, index: int, destination: Tensor) -> None:
        images = self._images[index]
        for one, own in zip(torch.split(destination, [len(image) for image in images]), images, strict=True):
            one.copy_(own, non_blocking=True)


class _DiskStore:
    """Keeps the images in one nameless file. An image is read into the host buffer in which `put` received it. While a
    sublayer computes, a thread reads ahead the image that followed the last time, if it uses the other buffer."""

    def __init__(self, folder: Path | None, num_bytes: int) -> None:
        self._folder = tempfile.gettempdir() if folder is None else folder
        self._images: dict[int, tuple[int, Tensor]] = {}
        self._end = 0
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rayspec-offload")
        self._ahead: tuple[int, Future[None]] | None = None
        self._followers: dict[int, int] = {}
        self._latest = -1
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (lives as long as self)
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            raise self._refused(error) from error
        descriptor = self._file.fileno()
        with suppress(OSError):  # a file system without direct I/O
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)

    def put(self, index: int, image: Tensor) -> None:
        content, descriptor = image.numpy().data, self._file.fileno()
        done = 0
        try:
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], self._end + done)
            os.fdatasync(descriptor)
        except OSError as error:
            raise self._refused(error) from error
        self._images[index] = self._end, image
        self._end += len(content)

    def get(self, index: int, destination: Tensor) -> None:
        if self._ahead is None or self._ahead[0] != index:
            self._read_ahead(index)
        assert self._ahead is not None
        (_, reading), self._ahead = self._ahead, None  # a read that fails is tried again
        reading.result()
        _, image = self._images[index]
        if destination.device.type != "cpu":
            destination.copy_(image)  # blocking: another read may overwrite `image`
        self._followers[self._latest] = index
        self._latest = index
        follower = self._followers.get(index, index)
        if self._images[follower][1].data_ptr() != image.data_ptr():
            self._read_ahead(follower)

    def _read_ahead(self, index: int) -> None:
        """Queue a read of the image after the current read; there is one reader thread."""
        self._ahead = index, self._reader.submit(self._read, index)

    def _read(self, index: int) -> None:
        offset, image = self._images[index]
        content, descriptor, done = image.numpy().data, self._file.fileno(), 0
        try:
            while done < len(content):
                count = os.preadv(descriptor, [content[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"weights offloaded to {self._folder} end too early: the file was cut")
                done += count
            # For file systems without direct I/O.
            os.posix_fadvise(descriptor, offset, len(content), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(f"weights offloaded to {self._folder} could not be read back: {error}") from error

    def _refused(self, error: OSError) -> ConfigError:
        return ConfigError(f"option 'folder' is {str(self._folder)!r}, which cannot take the weights: {error}")


def _page_aligned(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate a buffer in CPU memory, [num_bytes] uint8. Uses huge pages if possible: direct I/O is then three times
    faster. Pinned buffers use ordinary pages."""
    if pinned:
        memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8, pin_memory=True)
        page = _PAGE
    else:
        private = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            private.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(private, dtype=torch.uint8)
        page = _HUGE_PAGE
    start = -memory.data_ptr() % page
    return memory[start : start + num_bytes]


def _page_out(weight: Tensor) -> None:
    """Let the system drop the memory pages of a weight on the CPU, because a mapped checkpoint stays mapped while any
    of its tensors lives. Pages that are needed again are read again."""
    if weight.device.type == "cpu":
        start, end = _round_up(weight.data_ptr(), _PAGE), (weight.data_ptr() + weight.nbytes) // _PAGE * _PAGE
        if start < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
