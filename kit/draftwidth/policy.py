"""A load-adaptive draft width: from how many running requests on, which width.

Drafting pays while the GPU has compute to spare, so the best width falls as more requests run. An isolation sweep
(one deployment, every width at every load) says where: :func:`derive_policy` takes the fastest width of each load
point, and :func:`next_state` follows the table with hysteresis, so that a load that hovers about a boundary does not
switch at every step.

Everything here is a pure function of its arguments, counted in decode steps and never in seconds: inside a
tensor-parallel server each rank runs the policy for itself, all see the same batches, and so all switch in the same
step. A clock would split them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kit.errors import KitError

SETTING = "draft_width"
"""The key of ``POST /set_internal_state``; the policy's own keys begin with it and a dot."""


@dataclass(frozen=True)
class Row:
    """From ``running`` requests in the batch on, draft ``width`` tokens a step."""

    running: int
    width: int


@dataclass(frozen=True)
class WidthPolicy:
    """A table of widths by running requests, with hysteresis.

    ``rows``: rising in ``running``, the first at 1. ``margin``: requests by which the load must be past a boundary,
    on either side, before the other row is asked for. ``dwell_steps``: decode steps in a row that must ask for the
    same other row before it is taken. Raises KitError if the table is not one.
    """

    rows: tuple[Row, ...]
    margin: int = 0
    dwell_steps: int = 8

    def __post_init__(self) -> None:
        starts = [row.running for row in self.rows]
        if not starts or starts[0] != 1 or sorted(set(starts)) != starts:
            raise KitError(f"a width policy's rows must rise in running requests from 1; got {starts}")
        for what, value in (("margin", self.margin), *(("width", row.width) for row in self.rows)):
            if not _is_count(value):
                raise KitError(f"a width policy's {what} must be a whole number from 0; got {value!r}")
        if not _is_count(self.dwell_steps) or self.dwell_steps < 1:
            raise KitError(f"a width policy's dwell_steps must be a whole number from 1; got {self.dwell_steps!r}")

    @property
    def widths(self) -> list[int]:
        """Every width the table can ask for."""
        return sorted({row.width for row in self.rows})

    def to_json(self) -> str:
        """The policy as JSON, as :func:`load_policy` reads it."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_settings(self) -> dict[str, int]:
        """The policy as numbers only, which is all that ``/set_internal_state`` carries."""
        rows = {f"{SETTING}.from.{row.running}": row.width for row in self.rows}
        return {**rows, f"{SETTING}.margin": self.margin, f"{SETTING}.dwell_steps": self.dwell_steps}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def policy_from_json(text: str, where: str = "the policy") -> WidthPolicy:
    """Parse :meth:`WidthPolicy.to_json`. Raises KitError naming ``where`` for anything else."""
    try:
        raw = json.loads(text)
        rows = tuple(Row(**row) for row in raw["rows"])
        return WidthPolicy(rows, **{name: value for name, value in raw.items() if name != "rows"})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KitError(
            f'{where} is not a width policy: {error}; it looks like {{"rows": [{{"running": 1, "width": 4}}, '
            '{"running": 8, "width": 0}], "margin": 0, "dwell_steps": 8}'
        ) from error


def load_policy(path: Path) -> WidthPolicy:
    """Read a policy file. Raises KitError if it cannot be read or is not one."""
    try:
        return policy_from_json(path.read_text(), str(path))
    except OSError as error:
        raise KitError(f"cannot read the width policy {path}: {error.strerror}") from error


def policy_from_settings(settings: Mapping[str, float]) -> WidthPolicy:
    """The inverse of :meth:`WidthPolicy.to_settings`. Raises KitError for unknown keys or a bad table."""
    rows, rest = [], {}
    for key, value in settings.items():
        name = key.removeprefix(f"{SETTING}.")
        whole = int(value) if float(value).is_integer() else value
        if name.startswith("from.") and name.removeprefix("from.").isdigit():
            rows.append(Row(int(name.removeprefix("from.")), whole))
        elif name in ("margin", "dwell_steps"):
            rest[name] = whole
        else:
            raise KitError(
                f"unknown setting {key!r}; a policy has {SETTING}.from.<running>, {SETTING}.margin, "
                f"{SETTING}.dwell_steps"
            )
    return WidthPolicy(tuple(sorted(rows, key=lambda row: row.running)), **rest)


class PolicyState(NamedTuple):
    """Where a policy stands: the row in use, the row asked for instead, and for how many steps running."""

    row: int = 0
    asked_row: int = 0
    steps: int = 0


def next_state(policy: WidthPolicy, state: PolicyState, running: int) -> PolicyState:
    """The state after one decode step with ``running`` requests in its batch."""
    wanted = _row_for(policy, running)
    if wanted > state.row:  # rising: be margin past the boundary
        wanted = max(state.row, _row_for(policy, running - policy.margin))
    elif wanted < state.row:  # falling: be margin below it
        wanted = min(state.row, _row_for(policy, running + policy.margin))
    if wanted == state.row:
        return PolicyState(state.row, state.row, 0)
    steps = state.steps + 1 if wanted == state.asked_row else 1
    if steps >= policy.dwell_steps:
        return PolicyState(wanted, wanted, 0)
    return PolicyState(state.row, wanted, steps)


def _row_for(policy: WidthPolicy, running: int) -> int:
    return max(0, sum(row.running <= running for row in policy.rows) - 1)


@dataclass(frozen=True)
class SweepPoint:
    """One cell of an isolation sweep: requests running, draft width, output throughput (tokens/s)."""

    running: float
    width: int
    output_tps: float


def derive_policy(
    points: Iterable[SweepPoint], *, min_gain: float = 0.02, margin: int = 0, dwell_steps: int = 8
) -> WidthPolicy:
    """The table that an isolation sweep gives.

    At each load the width with the highest mean throughput over the repeats is taken, but a wider one only if it
    beats the narrower by ``min_gain`` (a share): within the noise less work is the better choice. The boundary
    between two loads lies at their geometric mean, rounded up, since loads are swept by doubling. Raises KitError
    unless every load has the same widths, at least two of them.
    """
    cells: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        cells[point.running][point.width].append(point.output_tps)
    if not cells:
        raise KitError("no cells to derive a width policy from; measure the isolation sweep first")
    widths = {load: sorted(at) for load, at in cells.items()}
    everywhere = sorted(set().union(*widths.values()))
    for load, found in sorted(widths.items()):
        if found != everywhere or len(found) < 2:
            raise KitError(
                f"the sweep at {load:g} running requests has widths {found}, but the whole sweep has {everywhere}; "
                "a policy needs at least two widths, each measured at every load"
            )
    loads = sorted(cells)
    rows = [Row(1, _best(cells[loads[0]], min_gain))]
    for below, load in itertools.pairwise(loads):
        width = _best(cells[load], min_gain)
        start = max(math.ceil(math.sqrt(below * load)), rows[-1].running + 1)
        if width != rows[-1].width:
            rows.append(Row(start, width))
    return WidthPolicy(tuple(rows), margin=margin, dwell_steps=dwell_steps)


def _best(at: Mapping[int, list[float]], min_gain: float) -> int:
    """The narrowest width that no wider one beats by ``min_gain``."""
    best = min(at)
    for width in sorted(at)[1:]:
        if fmean(at[width]) > fmean(at[best]) * (1 + min_gain):
            best = width
    return best
