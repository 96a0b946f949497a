"""Tables of several data files as input. Tests are skipped where the package of their kind is not installed:
pip install deltalake pylance "pyiceberg[sql-sqlite]" """

import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayspec.batch.documents import Piece, check_template, pieces_of, read_piece
from rayspec.batch.input_files import find_files
from rayspec.batch.job import LocalBackend, Source
from rayspec.batch.rows import Columns, Row
from rayspec.types import ConfigError


class Written:
    """A table in a folder, which grows and shrinks."""

    kind: str

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"table.{self.kind}"
        self._package = {"iceberg": "pyiceberg.catalog.memory"}.get(self.kind, self.kind)
        self._table: Any = None

    def append(self, *ids: str) -> None:
        package = import_module(self._package)
        rows = pa.table({"id": list(ids), "text": [f"text {one}" for one in ids], "year": len(ids) * [2020]})
        if self.kind == "deltalake":
            package.write_deltalake(self.path, rows, mode="append", partition_by=["year"])
        elif self.kind == "lance":
            package.write_dataset(rows, self.path, mode="append" if self.path.exists() else "create")
        else:
            if self._table is None:
                catalog = package.InMemoryCatalog("catalog", warehouse=str(self.path.parent))
                catalog.create_namespace("n")
                self._table = catalog.create_table("n.t", schema=rows.schema, location=str(self.path))
            self._table.append(rows)

    def delete(self, row_id: str) -> None:
        package = import_module(self._package)
        if self.kind == "iceberg":
            self._table.delete(f"id == '{row_id}'")
        elif self.kind == "lance":
            package.dataset(self.path).delete(f"id = '{row_id}'")
        else:
            package.DeltaTable(self.path).delete(f"id = '{row_id}'")


@pytest.fixture(params=["deltalake", "lance", "iceberg"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    pytest.importorskip(request.param.replace("iceberg", "pyiceberg"))
    if request.param == "iceberg":
        pytest.importorskip("sqlalchemy")
    return type("Of", (Written,), {"kind": request.param})(tmp_path)


def pieces(*inputs: object) -> list[Piece]:
    return pieces_of(find_files(map(str, inputs)).files)


def rows_of(*inputs: object, columns: Columns | None = None) -> list[Row]:
    sent = pickle.loads(pickle.dumps(pieces(*inputs)))  # as to a task of Ray
    return [row for piece in sent for _, row in read_piece(piece, columns or Columns())]


def test_the_rows_of_the_newest_version_are_read(table: Written, tmp_path: Path) -> None:
    table.append("a", "b", "c")
    table.append("d")
    table.delete("b")
    for given in (table.path, tmp_path, tmp_path / "t*", tmp_path / "**"):
        rows = rows_of(given)
        assert sorted((row.id, row.document, row.error) for row in rows) == [(n, f"text {n}", None) for n in "acd"]
    made = Columns(template="{{ text }} of {{ year }}")
    check_template(pieces(table.path), made)
    assert "text a of 2020" in {row.document for row in rows_of(table.path, columns=made)}


def test_what_was_found_is_read_although_the_table_has_changed(table: Written) -> None:
    table.append("a", "b")
    found = pieces(table.path)
    table.append("c")
    table.delete("a")
    assert sorted(row.id for piece in found for _, row in read_piece(piece, Columns())) == ["a", "b"]


def test_rows_without_ids_keep_theirs_when_the_table_grows(table: Written) -> None:
    columns, seen = Columns(id="none"), {}
    for ids in (("a", "b"), ("c",), ("d", "e")):
        table.append(*ids)
        now = {row.document: row.id for row in rows_of(table.path, columns=columns)}
        assert len(set(now.values())) == len(now)
        assert seen.items() <= now.items()
        seen = now
    assert len(seen) == 5


@pytest.mark.ray
def test_wanted_rows_are_read_by_both_backends(table: Written, ray_cluster: None) -> None:
    from rayspec.batch.ray_backend import RayBackend  # noqa: PLC0415

    table.append(*"abc")
    table.append(*"de")
    source = Source(files=find_files([str(table.path)]).files)
    for backend in (LocalBackend(), RayBackend()):
        scanned = backend.scan(source).rows
        assert sorted(scanned["id"].to_pylist()) == list("abcde")
        wanted = scanned.filter(pa.compute.is_in(scanned["id"], pa.array(["b", "e"])))
        assert sorted(row.document or "" for row in backend.rows(source, wanted, "input")) == ["text b", "text e"]


def test_a_missing_column_and_a_damaged_table_are_named(table: Written) -> None:
    table.append("a")
    (row,) = rows_of(table.path, columns=Columns(text="body"))
    assert row.error_kind == "missing_column"
    for file in table.path.rglob("*"):
        if file.suffix in (".json", ".manifest"):
            file.write_bytes(b"{")
    with pytest.raises(ConfigError, match="table cannot be read"):
        find_files([str(table.path)])


def test_an_iceberg_table_of_two_newest_versions_needs_the_name_of_one(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    for name in ("00001-a.metadata.json", "00002-b.metadata.json", "00002-c.metadata.json"):
        (tmp_path / "metadata" / name).touch()
    with pytest.raises(ConfigError, match=r"00002-b\S+ and 00002-c\S+ are both its newest version"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("names", "module", "package"),
    [
        (["_delta_log/00000000000000000000.json", "part-0.parquet"], "deltalake", "deltalake"),
        (["metadata/v1.metadata.json", "data/a.parquet"], "pyiceberg", "pyiceberg"),
        (["_versions/1.manifest", "data/a.lance"], "lance", "pylance"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], module: str, package: str
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    for name in names:
        (tmp_path / "table" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "table" / name).touch()
    for given in (tmp_path, tmp_path / "table", tmp_path / "t*"):
        with pytest.raises(ConfigError, match=f"needs a package .*: run `pip install {package}`"):
            find_files([str(given)])
