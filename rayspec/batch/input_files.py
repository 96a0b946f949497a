"""Finds the files that inputs name: files, folders and patterns. A mistake in a name ends the command at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import takewhile
from pathlib import PurePosixPath

from rayspec.batch.documents import KNOWN_TYPES, Piece, file_type
from rayspec.batch.run_folder import MANIFEST, PART_NAME, ROWS, RUN_SUFFIX
from rayspec.batch.tables import kind_of_log, newest_table
from rayspec.command.locations import Location, UnreadableFileError
from rayspec.errors import naming_the_extra
from rayspec.types import ConfigError

# Files below a folder that say something about the others: of Hugging Face's `save_to_disk`, and of a job's output.
_ABOUT_OTHERS = re.compile(r"(dataset_info|dataset_dict|state|manifest)\.json|cache-.*\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """Files in reading order, each once. found: as `_Search.found`. warning: which files in folders and patterns are
    left out, if any."""

    files: tuple[Piece, ...]
    found: Mapping[tuple[str, ...], Location | Piece | str] = field(default_factory=dict)
    warning: str | None = None

    def include(self, place: Location) -> bool:
        """Return whether a file is one of them, however it is named."""
        parts = _parts(place)
        return parts in self.found or any(
            isinstance(one, Location) and _parts(one) == parts for one in self.found.values()
        )


def find_files(inputs: Iterable[str], *, outputs: Iterable[str] = ()) -> InputFiles:
    """Find the files that paths and URIs name. A folder stands for all files of known types below it.

    Hidden files and folders below a folder are left out. A name that cannot be read stays in the list: reading yields
    an error row for it, and the other inputs are not affected. Raises ConfigError for a pattern without a match, for a
    URI of an unknown kind, for a table or PDF files whose package is not installed, for a table that cannot be read,
    and if no input can be read. A store that does not answer raises no error here.

    outputs: files and folders of the command's results. Folders and patterns leave them out.
    """
    search = _Search(outputs)
    for name in inputs:
        search.add(name)
    if search.useless and len(search.useless) == len(search.found):
        place, reason = next(iter(search.useless.items()))
        if len(search.useless) > 1:
            reason += f", and {len(search.useless) - 1} more inputs cannot be read either"
        raise ConfigError(f"input {str(search.found[place])!r}: {reason}; name files, folders or patterns that exist")
    num_shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*search.bases, strict=False)))
    files = []
    for parts, found in search.found.items():
        if isinstance(found, str):  # in a store that does not answer
            files.append(Piece(path=found, name=found))
            continue
        piece = found if isinstance(found, Piece) else Piece(path=found.absolute().name, name=found.name)
        name = "/".join(parts[num_shared:]) or piece.name
        shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        files.append(replace(piece, name=shown))
    if any(file.path.lower().endswith(".pdf") for file in files):
        with naming_the_extra():
            import_module("pypdf")
    warning = None
    if num_skipped := len(search.left_out):
        skipped = "1 file" if num_skipped == 1 else f"{num_skipped} files"
        warning = f"{skipped} skipped: {search.shown_types}; known are {KNOWN_TYPES}"
    return InputFiles(files=tuple(files), found=search.found, warning=warning)


class _Search:
    """found: files by the parts of their canonical path; a piece in place of a data file of a table, and a name in
    place of a file that no store answers for. useless: reasons why some of these cannot be read. left_out: suffixes of
    unknown types, by absolute name. bases: canonical paths of the inputs' base folders. _names: parts of files, by the
    parts without links to folders, which are kept in `_folders`."""

    def __init__(self, outputs: Iterable[str]) -> None:
        self.found: dict[tuple[str, ...], Location | Piece | str] = {}
        self.useless: dict[tuple[str, ...], str] = {}
        self.left_out: dict[str, str] = {}
        self.bases: list[tuple[str, ...]] = []
        self._num_base_parts = 0
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._folders: dict[str, tuple[str, ...]] = {}
        self._outputs = []
        for output in outputs:
            with suppress(UnreadableFileError):
                self._outputs.append(_parts(Location.parse(output)))

    def add(self, name: str) -> None:
        try:
            location = Location.parse(name)
            kind = location.kind
            self.bases.append(_parts(location.base))
            self._num_base_parts = len(PurePosixPath(location.base.path).parts)
        except UnreadableFileError:
            self.found.setdefault((name,), name)
            return
        reason = None
        if kind == "folder":
            if not self._keep_known(*location.below()):
                reason = f"the folder holds no file of a known type{self._left_out_types()}"
        elif kind is None and location.is_pattern:
            matches, files, unreadable = location.glob(), list[Location](), list[Location]()
            for match in matches:
                below = [match], list[Location]()
                with suppress(UnreadableFileError):  # reading a circular link reports the error
                    below = match.below() if match.is_folder else below
                files += below[0]
                unreadable += below[1]
            if not self._keep_known(files, unreadable):
                found = f"no file of a known type{self._left_out_types()}" if matches else "nothing"
                raise ConfigError(f"input {name!r}: it matches {found}; correct it, or leave it out")
        elif kind is None:
            reason = "there is no such file"
        elif kind_of_log(location):
            self._keep_known([location], [])
            return
        elif file_type(location.file_name) is None:
            reason = f"its type is not known; known are {KNOWN_TYPES}"
        if kind == "file" or reason is not None:
            parts = self._canonical(location)
            self._take({parts: location})
            if reason is not None:
                self.useless[parts] = reason

    def _canonical(self, place: Location) -> tuple[str, ...]:
        return (*self.bases[-1], *PurePosixPath(place.path).parts[self._num_base_parts :])

    def _keep_known(self, files: Iterable[Location], unreadable: Iterable[Location]) -> int:
        """Keep known files, data files of tables and unreadable folders, and record the others. Return how many."""
        kept: list[tuple[tuple[str, ...], Location | Piece]] = [(self._canonical(one), one) for one in unreadable]
        ours = {self._canonical(file): file for file in files}
        own = {parts for parts in ours if any(parts[: len(output)] == output for output in self._outputs)}
        results = {ours.pop(parts).absolute().name: "in the output" for parts in own}
        for parts in self._of_earlier_jobs(ours):
            file = ours.pop(parts)
            self.left_out[file.absolute().name] = "results of a job"
        logs: dict[tuple[str, ...], list[Location]] = {}
        for parts, file in ours.items():
            if kind_of_log(file):
                logs.setdefault(parts[:-2], []).append(file)
        for folder, log in logs.items():
            table = newest_table(str(kind_of_log(log[0])), log)
            kept += [((*folder, *name.split("/")), Piece(path=name, table=table)) for name in table.files]
        for parts, file in ours.items():
            if any(parts[:length] in logs for length in range(len(parts))):
                continue  # of a table, whose other files may hold rows that were deleted
            if _ABOUT_OTHERS.fullmatch(file.file_name):
                self.left_out[file.absolute().name] = file.file_name
            elif file_type(file.file_name) is None:
                self.left_out[file.absolute().name] = file.suffix or "no suffix"
            else:
                kept.append((parts, file))
        if not kept:  # the input is in the output's folder
            self.left_out |= results
        self._take(dict(kept))
        return len(kept)

    def _take(self, places: Mapping[tuple[str, ...], Location | Piece]) -> None:
        """Add files that have not been found by another name, through a link to a folder. A link to a file is a file of
        its own. places: by parts."""
        real = {parts: self._real(parts, place) for parts, place in places.items()}
        # By its own name, where that is one of them.
        for parts in sorted(real, key=lambda one: (real[one] != one, one)):
            self._names.setdefault(real[parts], parts)
        for parts in sorted(places):
            if self._names[real[parts]] == parts:
                self.found.setdefault(parts, places[parts])

    def _real(self, parts: tuple[str, ...], place: Location | Piece) -> tuple[str, ...]:
        """Return the parts without links to folders."""
        if isinstance(place, Piece) or not place.store.is_local:
            return parts
        folder = place.folder
        if folder.name not in self._folders:
            self._folders[folder.name] = _parts(folder)
        return (*self._folders[folder.name], place.file_name)

    def _of_earlier_jobs(self, ours: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
        """Return what jobs wrote below the input. Of a job that is the input, its merged file is read, or its rows."""
        parts_of_jobs = (parts for parts in ours if parts[-2:-1] == (ROWS,) and re.fullmatch(PART_NAME, parts[-1]))
        jobs = {parts[:-2] for parts in parts_of_jobs if (*parts[:-2], MANIFEST) in ours}
        below = {job for job in jobs if len(job) > len(self.bases[-1])}
        found = {parts for parts in ours if any(parts[:length] in below for length in range(len(parts)))}
        # A merged file may be next to the folder.
        found |= {(*job[:-1], job[-1].removesuffix(RUN_SUFFIX)) for job in below}.intersection(ours)
        for job in jobs - below:  # the input
            merged = {one for one in ours if one[:-1] == job and one[-1].endswith((".parquet", ".jsonl"))}
            found |= set(ours) - (merged or {one for one in ours if one[:-1] == (*job, ROWS)})
        return found

    def _left_out_types(self) -> str:
        return f" ({self.shown_types} left out)" if self.left_out else ""

    @property
    def shown_types(self) -> str:
        counts = sorted(Counter(self.left_out.values()).items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{suffix} ({number})" for suffix, number in counts)


def _parts(location: Location) -> tuple[str, ...]:
    return tuple(location.canonical_name.split("/"))
