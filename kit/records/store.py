"""The append-only store of a run: a folder with ``run.json``, ``results.jsonl`` and ``raw/``.

A cell is appended whole and fsynced: its raw request lines first, then its record, so that a record never
points at lines that are not there. A run that dies keeps its finished cells; opening the folder again and asking
:meth:`Run.done` says what is left. A torn last line (the machine went down mid-write) is set aside, not trusted.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kit.errors import KitError
from kit.records.schema import SCHEMA_VERSION, CellKey, CellRecord, RequestRecord, RunRecord, ServerSample

Record = TypeVar("Record", RunRecord, CellRecord, RequestRecord)

RESULTS = "results.jsonl"
RUN = "run.json"


def _write_durably(path: Path, data: bytes) -> None:
    """Write a whole file so that it is either there in full or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        # mkstemp makes private files; a record is meant to be read by whoever may read the folder.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Run:
    """One run's folder. Make with :meth:`create` or :meth:`open`."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.folder = folder
        self.record = record

    @classmethod
    def create(cls, folder: Path, record: RunRecord) -> Run:
        """Make the folder and write ``run.json``. Raises KitError if a run is already there."""
        if (folder / RUN).exists():
            raise KitError(f"{folder} already holds a run; open it to resume, or choose another folder")
        (folder / "raw").mkdir(parents=True, exist_ok=True)
        _write_durably(folder / RUN, record.model_dump_json(indent=1).encode())
        return cls(folder, record)

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open a run's folder. Raises KitError if it holds none, or one of another schema version."""
        path = folder / RUN
        if not path.is_file():
            raise KitError(f"{folder} holds no run: {RUN} is missing")
        return cls(folder, _parse(RunRecord, path.read_text(), str(path)))

    def append(self, record: CellRecord, requests: Iterable[RequestRecord] = ()) -> CellRecord:
        """Append one finished cell durably and return its record as stored (with ``raw`` filled in).

        A cell recorded as failed or invalid may be measured again; its first record stays in the file. Raises
        KitError if the cell is already there otherwise: records are immutable.
        """
        earlier = [c for c in self._all() if c.cell.id == record.cell.id]
        if any(c.status == "ok" for c in earlier):
            raise KitError(f"cell {record.cell.id} is already recorded in {self.folder / RESULTS}")
        lines = "".join(request.model_dump_json() + "\n" for request in requests)
        if lines:
            attempt = f".attempt{len(earlier) + 1}" if earlier else ""
            relative = f"raw/{record.cell.id}{attempt}.jsonl.gz"
            (self.folder / "raw").mkdir(exist_ok=True)
            # mtime=0: the same lines give the same bytes.
            _write_durably(self.folder / relative, gzip.compress(lines.encode(), mtime=0))
            record = record.model_copy(update={"raw": relative})
        path = self.folder / RESULTS
        self._drop_torn_line()
        with path.open("ab") as handle:
            handle.write(record.model_dump_json().encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
        return record

    def cells(self) -> list[CellRecord]:
        """The recorded cells in the order they were measured; of a cell measured again, the last record."""
        return list({record.cell.id: record for record in self._all()}.values())

    def _all(self) -> list[CellRecord]:
        path = self.folder / RESULTS
        if not path.exists():
            return []
        found = []
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            if not line.endswith("\n"):
                break  # torn: the write never finished, so the cell was never recorded
            found.append(_parse(CellRecord, line, f"{path}:{number}"))
        return found

    def done(self) -> set[str]:
        """Ids of the cells that need no measuring again: the good ones."""
        return {c.cell.id for c in self.cells() if c.status == "ok"}

    def requests(self, record: CellRecord) -> Iterator[RequestRecord]:
        """The raw request lines of a cell. Raises KitError if the file the record names is not there."""
        if record.raw is None:
            return
        path = self.folder / record.raw
        if not path.is_file():
            raise KitError(f"{path} is missing, though {self.folder / RESULTS} names it")
        with gzip.open(path, "rt") as handle:
            for number, line in enumerate(handle, 1):
                yield _parse(RequestRecord, line, f"{path}:{number}")

    def keep_samples(self, cell: CellKey, samples: Iterable[ServerSample]) -> None:
        """Keep a server's own figures over time beside a cell's raw requests; nothing is written for none."""
        lines = "".join(sample.model_dump_json() + "\n" for sample in samples)
        if lines:
            _write_durably(self._samples(cell), gzip.compress(lines.encode(), mtime=0))

    def samples(self, cell: CellKey) -> list[ServerSample]:
        """The samples kept of a cell, in time's order; none if there are none."""
        path = self._samples(cell)
        if not path.is_file():
            return []
        with gzip.open(path, "rt") as handle:
            return [ServerSample.model_validate_json(line) for line in handle]

    def _samples(self, cell: CellKey) -> Path:
        return self.folder / "raw" / f"{cell.id}.samples.jsonl.gz"

    def _drop_torn_line(self) -> None:
        path = self.folder / RESULTS
        if not path.exists():
            return
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            whole, _, torn = data.rpartition(b"\n")
            (self.folder / f"{RESULTS}.torn").write_bytes(torn)
            _write_durably(path, whole + b"\n" if whole else b"")


def find_runs(roots: Iterable[Path], model: str, experiment: str | None = None) -> list[Run]:
    """Runs of a model (that hold cells of an experiment, if named) under ``<root>/<model>/*/``, newest first."""
    found = []
    for root in roots:
        for path in sorted((root / model).glob(f"*/{RUN}")):
            run = Run.open(path.parent)
            if experiment is None or any(c.cell.experiment == experiment for c in run.cells()):
                found.append(run)
    return sorted(found, key=lambda run: run.record.created_at, reverse=True)


def _parse(model: type[Record], text: str, where: str) -> Record:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise KitError(f"{where} is not a record: it is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise KitError(f"{where} is not a record: it holds no JSON object")
    version = raw.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise KitError(
            f"{where} has schema version {version}; this kit reads version {SCHEMA_VERSION}. "
            "Use the kit of the commit named in run.json to read it."
        )
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the record"
        raise KitError(f"{where}: {field}: {first['msg']}") from error
