"""An SGLang plugin: let a running server change its draft width, without a restart and without losing a request.

It runs only inside SGLang's own processes. SGLang finds it by the entry point ``draft_width`` in the group
``sglang.srt.plugins``; it does something only if ``SGLANG_PLUGINS`` names it (with the variable unset SGLang loads
every plugin it finds, and an installed kit must not change a server unasked). The server must be started with the
machinery for several widths::

    --speculative-algorithm NEXTN --speculative-eagle-topk 1 --speculative-num-steps 4
    --speculative-num-draft-tokens 5 --speculative-adaptive --speculative-adaptive-config widths.json

with ``{"1": {"candidate_steps": [0, 1, 2, 4]}}`` in ``widths.json``: SGLang then builds graphs and buffers for each
candidate at start-up and can change between them at the head of a decode step. What it lacks is a way to be told;
this plugin adds one: ``POST /set_internal_state {"server_args": {"draft_width": k}}``, where k is

* a candidate (0 = drafting off): keep to that width;
* -1: follow the width policy (:mod:`kit.draftwidth.policy`), from the file that ``KIT_DRAFT_WIDTH_POLICY`` names at
  start-up, or sent beside it as numbers (:meth:`~kit.draftwidth.policy.WidthPolicy.to_settings`);
* -2: let SGLang's own adaptive algorithm choose.

The answer is HTTP 200 with ``[true]`` or ``[false]``, so ``GET /server_info`` says the rest:
``internal_states[i].draft_width`` holds what was asked, what is in use, the candidates, the last refusal with its
reason, and counters of steps and accepted drafts by width (see :meth:`WidthControl.report`).

Why this is safe. The handler only notes the wish; SGLang itself asks for the width at the head of each decode step
(``activate_step_by_batch``) and swaps all that depends on it at once, so a step never sees a mixture and no request
is touched. Rank 0 of a tensor-parallel group broadcasts the request to all ranks before any handles it, so all
change in the same step. With pipeline parallelism only the last stage holds the draft model and the first one
answers, so the setting is refused there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kit.draftwidth.policy import SETTING, PolicyState, WidthPolicy, load_policy, next_state, policy_from_settings
from kit.errors import KitError

log = logging.getLogger(__name__)

REPORT_VERSION = 1
"""Of :meth:`WidthControl.report`'s fields."""

POLICY_FILE = "KIT_DRAFT_WIDTH_POLICY"
"""Environment variable: a width policy to load and follow from the start. The same file on every node."""

AUTO = -1
SGLANG = -2
MODES = {AUTO: "auto", SGLANG: "sglang"}

PARAMS = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
TOKENS_PER_REQ = "sglang.srt.speculative.spec_utils.resolve_num_tokens_per_req"
SET_STATE = "sglang.srt.managers.scheduler.Scheduler.set_internal_state"
GET_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


class WidthControl:
    """What one rank has been asked for, and what it did: the part of the plugin that needs no SGLang.

    ``candidates``: the widths the server has built. ``start``: the width it starts with. ``policy``: followed from
    the start if given. Raises KitError if the policy asks for a width that is not a candidate.
    """

    def __init__(self, candidates: list[int], start: int, policy: WidthPolicy | None = None) -> None:
        self.candidates = list(candidates)
        self.mode = "fixed"
        self.width = start
        self.policy: WidthPolicy | None = None
        self.state = PolicyState()
        self.refused: dict[str, Any] | None = None
        # By width: decode steps, requests summed over them, verifications, accepted drafts.
        self.counts: dict[int, list[int]] = {}
        self._stepped = start
        if policy is not None:
            self.request({SETTING: AUTO, **policy.to_settings()})
            if self.refused is not None:
                raise KitError(f"the width policy cannot be followed: {self.refused['reason']}")

    def request(self, settings: Mapping[str, float]) -> bool:
        """Take or refuse a wish, whole or not at all; why it was refused is kept in ``refused``."""
        try:
            mode, width, policy = self._check(settings)
        except KitError as error:
            self.refused = {"asked": dict(settings), "reason": str(error)}
            return False
        if policy is not None and policy != self.policy:
            self.policy, self.state = policy, PolicyState()
        self.mode, self.refused = mode, None
        if width is not None:
            self.width = width
        return True

    def _check(self, settings: Mapping[str, float]) -> tuple[str, int | None, WidthPolicy | None]:
        others = sorted(key for key in settings if key.partition(".")[0] != SETTING)
        if others:
            raise KitError(f"{SETTING} is set alone, not together with {', '.join(others)}")
        wish = settings.get(SETTING)
        if isinstance(wish, bool) or not isinstance(wish, int | float) or not float(wish).is_integer():
            raise KitError(f"{SETTING} must be {self._valid()}; got {wish!r}")
        wish = int(wish)
        sent = {key: value for key, value in settings.items() if key != SETTING}
        if sent and wish != AUTO:
            raise KitError(f"a policy's settings go with {SETTING} = {AUTO}, not {wish}")
        if wish == SGLANG:
            return MODES[wish], None, None
        if wish == AUTO:
            policy = policy_from_settings(sent) if sent else self.policy
            if policy is None:
                raise KitError(f"the server has no width policy: send one, or start it with {POLICY_FILE}")
            unknown = sorted(set(policy.widths) - set(self.candidates))
            if unknown:
                raise KitError(f"the policy asks for widths {unknown}; the candidates are {self.candidates}")
            return MODES[wish], None, policy
        if wish not in self.candidates:
            raise KitError(f"{SETTING} must be {self._valid()}; got {wish}")
        return "fixed", wish, None

    def _valid(self) -> str:
        return f"one of {self.candidates}, {AUTO} (policy) or {SGLANG} (SGLang's own)"

    def step(self, running: int, sglangs: Callable[[], int]) -> int:
        """The width of the decode step about to begin; ``sglangs`` gives SGLang's own choice."""
        if self.mode == "auto":
            self.state = next_state(self.policy, self.state, running)
            width = self.policy.rows[self.state.row].width
        else:
            width = self.width if self.mode == "fixed" else sglangs()
        counts = self.counts.setdefault(width, [0, 0, 0, 0])
        counts[0] += 1
        counts[1] += running
        self._stepped = width
        return width

    def verified(self, correct: list[int]) -> None:
        """Count a finished verification: accepted drafts of each of its requests.

        SGLang reports a step while the next may be running already, so at a change of width one step's drafts can
        be counted under the wrong width.
        """
        counts = self.counts.setdefault(self._stepped, [0, 0, 0, 0])
        counts[2] += len(correct)
        counts[3] += sum(correct)

    def report(self, in_use: int | None) -> dict[str, Any]:
        """All of it in plain types. ``in_use``: the width of the worker's current state."""
        names = ("steps", "requests", "verified", "accepted")
        return {
            "version": REPORT_VERSION,
            "active": True,
            "reason": None,
            "mode": self.mode,
            "asked": {"auto": AUTO, "sglang": SGLANG}.get(self.mode, self.width),
            "in_use": in_use,
            "candidates": list(self.candidates),
            "refused": self.refused,
            "policy": None if self.policy is None else self.policy.to_settings(),
            "counts": {str(k): dict(zip(names, v, strict=True)) for k, v in sorted(self.counts.items())},
        }


def controlled_params(base: type) -> type:
    """SGLang's ``AdaptiveSpeculativeParams`` with its two decisions handed to a :class:`WidthControl`."""

    class ControlledParams(base):
        def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
            super().__init__(initial_steps, cfg_path)
            path = os.environ.get(POLICY_FILE)
            policy = load_policy(Path(path)) if path else None
            self.width_control = WidthControl(self.candidate_steps, initial_steps, policy)
            self._graph_sizes: list[int] | None = None

        def get_steps_for_batch(self, batch_size: int) -> int:
            return self.width_control.step(batch_size, functools.partial(super().get_steps_for_batch, batch_size))

        def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
            self.width_control.verified(num_correct_drafts_per_req)
            if self.width_control.mode != "sglang":
                return None
            return super().on_verify_complete(num_correct_drafts_per_req, batch_size)

        def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
            super().set_cuda_graph_bs(cuda_graph_bs)
            self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

        def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
            # SGLang prunes sizes at which its own table would not choose the step; here any may be asked for.
            return self._graph_sizes

    return ControlledParams


def _control(scheduler: Any) -> WidthControl | None:
    controller = getattr(getattr(scheduler, "draft_worker", None), "adaptive_controller", None)
    return getattr(getattr(controller, "params", None), "width_control", None)


def why_inactive(scheduler: Any) -> str | None:
    """Why this scheduler cannot change its width; None if it can."""
    needs = "start it with --speculative-algorithm NEXTN --speculative-eagle-topk 1 --speculative-adaptive"
    if getattr(scheduler.server_args, "pp_size", 1) > 1:
        return "with pipeline parallelism the draft width is fixed (only the last stage holds the draft model)"
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None:
        return f"the server runs without speculative decoding; {needs}"
    if getattr(worker, "adaptive_controller", None) is None:
        return (
            f"the server's {type(worker).__name__} has one width only: adaptive widths were not asked for, or SGLang "
            f"fell back to one (its log says 'speculative_adaptive disabled'); {needs}"
        )
    if _control(scheduler) is None:
        return f"the hook on {PARAMS} did not take; the server's log says why"
    return None


def set_internal_state(original: Callable, scheduler: Any, request: Any) -> Any:
    """Hook around ``Scheduler.set_internal_state``: take the plugin's own settings, pass on all others."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    settings = request.server_args
    if not any(key.partition(".")[0] == SETTING for key in settings):
        return original(scheduler, request)
    reason = why_inactive(scheduler)
    updated = False
    if reason is None:
        control = _control(scheduler)
        updated = control.request(settings)
        reason = None if updated else control.refused["reason"]
    log.info("%s %s: %s", SETTING, settings, "taken" if updated else f"refused, {reason}")
    return SetInternalStateReqOutput(updated=updated)


def get_internal_state(original: Callable, scheduler: Any, request: Any) -> Any:
    """Hook around ``Scheduler.get_internal_state``: add the plugin's report."""
    output = original(scheduler, request)
    reason = why_inactive(scheduler)
    if reason is None:
        report = _control(scheduler).report(getattr(scheduler.draft_worker, "speculative_num_steps", None))
    else:
        report = {"version": REPORT_VERSION, "active": False, "reason": reason}
    output.internal_state[SETTING] = report
    return output


def tokens_per_req(original: Callable, *args: Any, **kwargs: Any) -> int:
    """Hook around ``resolve_num_tokens_per_req``: size draft-extend graphs by the width being built.

    Where the function is handed the start-up arguments (0.5.17), every candidate's draft-extend graph is captured at
    the start-up width, fits no other width, and those widths run draft-extend without a graph: a comparison of widths
    would then measure that. Where it is not (0.5.23), SGLang sizes them by the width being built itself.
    """
    startup = kwargs.get("server_args")
    if kwargs.get("phase") == "draft_extend" and startup is not None and startup.speculative_adaptive:
        from sglang.srt.runtime_context import get_spec

        return get_spec().speculative_num_draft_tokens
    return original(*args, **kwargs)


def register() -> None:
    """Entry point: register the hooks with SGLang (which applies them, and logs it if one fails)."""
    if SETTING not in [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        log.info("%s: not named in SGLANG_PLUGINS, so nothing is changed", SETTING)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    HookRegistry.register(PARAMS, controlled_params(AdaptiveSpeculativeParams), HookType.REPLACE)
    HookRegistry.register(SET_STATE, set_internal_state, HookType.AROUND)
    HookRegistry.register(GET_STATE, get_internal_state, HookType.AROUND)
    HookRegistry.register(TOKENS_PER_REQ, tokens_per_req, HookType.AROUND)
