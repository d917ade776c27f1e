"""What a comparison of arms shows, told from their resolved settings.

One difference between two arms: the comparison isolates that switch. More: deployments are compared, and every
difference is listed. A different model, layout, engine build or workload: the arms do not belong on one chart,
and :func:`require_comparable` says which field differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kit.errors import KitError
from kit.records.schema import CellRecord, Scalar

BLOCKING = ("model_stamp", "layout", "engine", "engine_build", "workload_hash", "machine")
"""Fields that must be equal for arms to share a chart."""

DERIVED = ("base_url", "port", "pid", "started", "draft_kv_bytes", "log")
"""Resolved fields that follow from another setting or from chance; not differences of their own."""


@dataclass(frozen=True)
class Difference:
    """One setting that differs, with each arm's value (an arm that reports none has None)."""

    field: str
    values: dict[str, Scalar]

    def __str__(self) -> str:
        return f"{self.field} (" + ", ".join(f"{arm}: {_show(value)}" for arm, value in self.values.items()) + ")"


@dataclass(frozen=True)
class Comparison:
    """All differences between arms, split into those that forbid one chart and the rest."""

    arms: list[str]
    differences: list[Difference]
    blocking: list[Difference]
    attached: bool = False
    """The servers were not started by the kit: what they resolved is known only as far as they tell it."""

    @property
    def isolates(self) -> str | None:
        """The one switch that differs, if it is the only difference and all differences are known."""
        only = len(self.differences) == 1 and not self.blocking and not self.attached
        return self.differences[0].field if only else None

    def sentence(self) -> str:
        """For a caption: what the comparison shows."""
        if self.blocking:
            return "Not comparable: " + "; ".join(map(str, self.blocking)) + "."
        if self.attached:
            told = "; ".join(map(str, self.differences)) or "nothing"
            return (
                f"Deployments are compared: of what the attached servers tell of themselves, {told} differs. "
                "What they do not tell may differ too."
            )
        if not self.differences:
            return "The arms' resolved settings are equal (an A/A comparison)."
        if self.isolates:
            return f"One switch differs: {self.differences[0]}. The comparison isolates it."
        listed = "; ".join(map(str, self.differences))
        return f"Deployments are compared: {len(self.differences)} settings differ: {listed}."


def compare(cells_by_arm: Mapping[str, Sequence[CellRecord]]) -> Comparison:
    """List every difference between arms.

    An arm's settings are those its cells *resolved*; a setting that varies within an arm is compared as the sorted
    list of its values. Raises KitError for an arm without cells.
    """
    settings = {}
    for arm, cells in cells_by_arm.items():
        if not cells:
            raise KitError(f"arm {arm} has no recorded cells to compare")
        settings[arm] = _settings(cells)
    fields = sorted({field for found in settings.values() for field in found})
    differences, blocking = [], []
    for field in fields:
        values = {arm: found.get(field) for arm, found in settings.items()}
        if len({_show(value) for value in values.values()}) > 1:
            (blocking if field in BLOCKING else differences).append(Difference(field, values))
    attached = any(cell.resolved.get("engine") == "openai" for cells in cells_by_arm.values() for cell in cells)
    return Comparison(list(cells_by_arm), differences, blocking, attached)


def require_comparable(cells_by_arm: Mapping[str, Sequence[CellRecord]]) -> Comparison:
    """As :func:`compare`; raises KitError, naming each field that differs, where one chart would mislead."""
    found = compare(cells_by_arm)
    if found.blocking:
        raise KitError(
            "these arms cannot be drawn on one chart: "
            + "; ".join(map(str, found.blocking))
            + ". Measure them with the same model, layout, engine build and workload, or draw them apart."
        )
    return found


def _settings(cells: Sequence[CellRecord]) -> dict[str, Scalar]:
    found: dict[str, set[str]] = {}
    first: dict[str, Scalar] = {}
    for cell in cells:
        for field, value in {**cell.resolved, "workload_hash": cell.workload_hash}.items():
            if field not in DERIVED:
                found.setdefault(field, set()).add(_show(value))
                first.setdefault(field, value)
    return {field: first[field] if len(shown) == 1 else " | ".join(sorted(shown)) for field, shown in found.items()}


def _show(value: Scalar) -> str:
    return "not reported" if value is None else str(value)
