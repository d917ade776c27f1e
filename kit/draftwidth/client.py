"""Set and read the draft width of a running SGLang server, and believe only what it reports.

SGLang answers a setting with HTTP 200 whether it took it or not, and a width that was taken is in use only from the
next decode step on. So :func:`set_width` asks three times: is the plugin there, was the wish taken (if not: why), and
has the width come into use. A server without traffic makes no decode steps; it is sent one request of a few tokens
to make some, or, if that is not wanted, the result says ``pending``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.draftwidth.policy import SETTING, WidthPolicy
from kit.engines.base import HttpError, api_headers, request_json
from kit.errors import KitError

AUTO = -1
"""Follow a width policy inside the server."""
SGLANG = -2
"""Leave the choice to SGLang's own adaptive algorithm."""

POLL_S = 0.1
IDLE_POLLS = 3
"""Polls without a decode step after which the server counts as idle."""
NUDGE_TOKENS = 8

HOW_TO_ACTIVATE = (
    "install the kit in the server's environment and start the server with SGLANG_PLUGINS=draft_width; its log then "
    "says 'Executed general plugin: draft_width'"
)


class WidthError(KitError):
    """The width could not be read or set; the message says why."""


@dataclass(frozen=True)
class RankWidth:
    """What one scheduler (one data-parallel replica) reports; see the plugin's ``WidthControl.report``."""

    mode: str
    asked: int
    in_use: int | None
    candidates: tuple[int, ...]
    refused: dict[str, Any] | None
    policy: dict[str, int] | None
    counts: dict[int, dict[str, int]]
    """By width: decode steps, requests summed over them, verifications, accepted drafts."""

    @property
    def steps(self) -> int:
        """Decode steps so far, over all widths."""
        return sum(counts["steps"] for counts in self.counts.values())

    @property
    def settled(self) -> bool:
        """Whether the width in use is the one asked for (a policy's width is whatever is in use)."""
        return self.mode != "fixed" or self.in_use == self.asked


@dataclass(frozen=True)
class WidthState:
    """The server's draft width, over all its replicas."""

    ranks: tuple[RankWidth, ...]

    @property
    def asked(self) -> int | None:
        """The wish: a width, -1 (policy) or -2 (SGLang's own). None if replicas differ."""
        return _same([rank.asked for rank in self.ranks])

    @property
    def in_use(self) -> int | None:
        """The width of the last decode step. None if replicas differ or do not say."""
        return _same([rank.in_use for rank in self.ranks])

    @property
    def candidates(self) -> list[int]:
        """The widths every replica can take."""
        return sorted(set.intersection(*(set(rank.candidates) for rank in self.ranks)))

    @property
    def pending(self) -> bool:
        """Asked for, but not yet in use everywhere: it will be from the next decode step on."""
        return not all(rank.settled for rank in self.ranks)

    def counts(self) -> dict[int, dict[str, int]]:
        """Counters by width, summed over the replicas."""
        total: dict[int, dict[str, int]] = {}
        for rank in self.ranks:
            for width, counts in rank.counts.items():
                into = total.setdefault(width, dict.fromkeys(counts, 0))
                for name, value in counts.items():
                    into[name] += value
        return total

    def __str__(self) -> str:
        mode = self.ranks[0].mode
        wish = {"auto": "by policy", "sglang": "by SGLang's own algorithm"}.get(mode, f"{self.asked} asked for")
        in_use = "differs between replicas" if self.in_use is None else f"{self.in_use} in use"
        return f"draft width {in_use}, {wish}{', pending' if self.pending else ''}; candidates {self.candidates}"


def _same(values: list[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def get_width(url: str, *, api_key_env: str | None = None, timeout_s: float = 10.0) -> WidthState:
    """The server's width. Raises WidthError if the plugin is not there or cannot work, with the reason."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        info = request_json("GET", f"{url}/server_info", headers=api_headers(api_key_env), timeout_s=timeout_s)
    except HttpError as error:
        if error.status != 404:
            raise
        raise WidthError(
            f"{url} is no SGLang server: it has no /server_info. The width of a running server can be changed in "
            f"SGLang with the {SETTING} plugin: {HOW_TO_ACTIVATE}"
        ) from error
    states = info.get("internal_states") if isinstance(info, dict) else None
    if not isinstance(states, list) or not states:
        raise WidthError(
            f"{url} is no SGLang server: its /server_info has no internal_states. Behind a router, name the server "
            "itself (with prefill/decode disaggregation: the decode server)"
        )
    reports = [state.get(SETTING) if isinstance(state, dict) else None for state in states]
    if any(not isinstance(report, dict) for report in reports):
        raise WidthError(f"the server at {url} does not run the {SETTING} plugin: {HOW_TO_ACTIVATE}")
    for report in reports:
        if not report.get("active"):
            raise WidthError(f"the server at {url} cannot change its draft width: {report.get('reason')}")
    return WidthState(tuple(_rank(report) for report in reports))


def _rank(report: dict[str, Any]) -> RankWidth:
    try:
        return RankWidth(
            mode=report["mode"],
            asked=report["asked"],
            in_use=report["in_use"],
            candidates=tuple(report["candidates"]),
            refused=report["refused"],
            policy=report["policy"],
            counts={int(width): dict(counts) for width, counts in report["counts"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WidthError(
            f"the server's {SETTING} plugin reports in a form this kit does not read ({error!r}); run one version of "
            "the kit on both sides"
        ) from error


def set_width(
    url: str,
    width: int,
    *,
    policy: WidthPolicy | None = None,
    nudge: bool = True,
    timeout_s: float = 30.0,
    api_key_env: str | None = None,
) -> WidthState:
    """Set the width and wait until the server reports it in use; the state it then reports.

    ``width``: a candidate, :data:`AUTO` (with ``policy``, or the one the server has) or :data:`SGLANG`. ``nudge``: send
    an idle server one short request, so that it makes a decode step; without it an idle server's state comes back
    ``pending``. Raises WidthError if the plugin is not there, refuses (with its reason and the candidates), or does
    not report the width in use within ``timeout_s``.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = api_headers(api_key_env)
    deadline = time.monotonic() + timeout_s
    before = get_width(url, api_key_env=api_key_env)
    settings = {SETTING: width, **({} if policy is None else policy.to_settings())}
    answer = request_json(
        "POST", f"{url}/set_internal_state", body={"server_args": settings}, headers=headers, timeout_s=timeout_s
    )
    state = get_width(url, api_key_env=api_key_env)
    if not isinstance(answer, list) or not answer or not all(taken is True for taken in answer):
        raise WidthError(_refusal(url, width, answer, state))
    idle = 0
    while True:
        if all(rank.settled and rank.asked == width for rank in state.ranks):
            return state
        idle = idle + 1 if sum(r.steps for r in state.ranks) == sum(r.steps for r in before.ranks) else 0
        if idle >= IDLE_POLLS:
            if not nudge:
                return state
            _make_steps(url, headers, max(1.0, deadline - time.monotonic()))
            idle = 0
        elif time.monotonic() > deadline:
            raise WidthError(
                f"the server at {url} took {SETTING} = {width} but does not report it in use after {timeout_s:g} s: "
                f"{state}. Is another client setting it too?"
            )
        else:
            time.sleep(POLL_S)
        before, state = state, get_width(url, api_key_env=api_key_env)


def _refusal(url: str, width: int, answer: Any, state: WidthState) -> str:
    for rank in state.ranks:
        if rank.refused is not None and rank.refused.get("asked", {}).get(SETTING) == width:
            return f"the server at {url} refused: {rank.refused['reason']}"
    return f"the server at {url} refused {SETTING} = {width} (it answered {answer!r}); candidates: {state.candidates}"


def _make_steps(url: str, headers: dict[str, str], timeout_s: float) -> None:
    """One short generation by token ids, which needs no tokenizer (0 is what SGLang's own health check sends)."""
    sampling = {"max_new_tokens": NUDGE_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": sampling}
    try:
        request_json("POST", f"{url}/generate", body=body, headers=headers, timeout_s=timeout_s)
    except HttpError as error:
        raise WidthError(f"{url} took the width, but the short request to bring it into use failed: {error}") from error


def watch(url: str, *, interval_s: float = 1.0, api_key_env: str | None = None) -> Iterator[WidthState]:
    """The state now, and again whenever the wish or the width in use has changed. Ends only with the caller."""
    shown: tuple | None = None
    while True:
        state = get_width(url, api_key_env=api_key_env)
        key = tuple((rank.mode, rank.asked, rank.in_use) for rank in state.ranks)
        if key != shown:
            shown = key
            yield state
        time.sleep(interval_s)
