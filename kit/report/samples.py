"""A server's own figures over time, kept beside a cell's raw requests."""

from __future__ import annotations

import gzip

from kit.records.schema import CellRecord, ServerSample
from kit.records.store import Run


def samples_of(run: Run, cell: CellRecord) -> list[ServerSample]:
    """The samples of a cell, in time's order; none if they were not kept."""
    path = run.folder / "raw" / f"{cell.cell.id}.samples.jsonl.gz"
    if not path.is_file():
        return []
    with gzip.open(path, "rt") as handle:
        return [ServerSample.model_validate_json(line) for line in handle]
