"""The files of a driven cell: what the driver writes and the rest of the kit reads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from kit.records.schema import RequestRecord, ServerSample

REQUESTS = "requests.jsonl.gz"
SAMPLES = "samples.jsonl"
RESULT = "result.json"
WORKER = "worker.json"


def write_requests(folder: Path, requests: list[RequestRecord]) -> None:
    """Write the raw request lines, the same bytes for the same requests."""
    lines = "".join(request.model_dump_json() + "\n" for request in requests)
    (folder / REQUESTS).write_bytes(gzip.compress(lines.encode(), mtime=0))


def read_requests(folder: Path) -> Iterator[RequestRecord]:
    """The raw request lines of a driven cell."""
    with gzip.open(folder / REQUESTS, "rt") as handle:
        for line in handle:
            yield RequestRecord.model_validate_json(line)


def write_samples(folder: Path, found: list[ServerSample]) -> None:
    """Write the server's sampled metrics."""
    (folder / SAMPLES).write_text("".join(sample.model_dump_json() + "\n" for sample in found))


def read_samples(folder: Path) -> list[ServerSample]:
    """The server's sampled metrics of a driven cell."""
    return [ServerSample.model_validate_json(line) for line in (folder / SAMPLES).read_text().splitlines()]
