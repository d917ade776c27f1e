"""From notebooks to a report: papermill runs them, nbconvert renders them, one page holds them, a browser prints it."""

from kit.report.build import build
from kit.report.make import make

__all__ = ["build", "make"]
