"""The load driver: traces, arrivals, a streaming client, the driver's process and its window arithmetic.

From elsewhere: :func:`run_cell` drives one cell in a process of its own, :func:`load_result` reads it back.
"""

from kit.load.cell import load_requests, load_result, load_samples, recompute, run_cell
from kit.load.spec import DriverResult, LoadSpec
from kit.load.window import Measured, measure, parse_slo

__all__ = [
    "DriverResult",
    "LoadSpec",
    "Measured",
    "load_requests",
    "load_result",
    "load_samples",
    "measure",
    "parse_slo",
    "recompute",
    "run_cell",
]
