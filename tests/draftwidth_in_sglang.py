"""Run the plugin against SGLang's own code, without a GPU; one scenario a call, asserted here.

Real, from the wheel: the plugin loader and hook registry, the adaptive parameters, the controller that swaps runtime
states, and the bodies of ``Scheduler.set_internal_state``, ``Scheduler.get_internal_state`` and
``resolve_num_tokens_per_req`` (cut out of their files, whose imports need a GPU host). Made up: the worker, which only
notes which state it was given, and what else those bodies touch.
"""

import ast
import importlib
import inspect
import sys
import types
from pathlib import Path
from types import SimpleNamespace

WHEEL = Path(sys.argv[1])


def package(name, **attributes):
    """A package whose submodules come from the wheel, but whose own ``__init__`` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(WHEEL.joinpath(*name.split(".")))]
    vars(module).update(attributes)
    sys.modules[name] = module
    if "." in name:
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    return module


def cut(path, *names, scope, inside=None):
    """Execute functions or classes of a wheel's file in ``scope`` and return them."""
    tree = ast.parse((WHEEL / path).read_text())
    body = tree.body
    if inside:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == inside).body
    wanted = [node for node in body if getattr(node, "name", None) in names]
    assert len(wanted) == len(names), f"{path} has not all of {names}"
    module = ast.Module(body=[ast.parse("from __future__ import annotations").body[0], *wanted], type_ignores=[])
    exec(compile(module, path, "exec"), scope)
    return [scope[name] for name in names]


class Output:
    """``SetInternalStateReqOutput`` and ``GetInternalStateReqOutput``: keyword-only fields."""

    def __init__(self, *, updated=None, internal_state=None):
        self.updated, self.internal_state = updated, internal_state


SPEC = SimpleNamespace(speculative_num_draft_tokens=5, speculative_eagle_topk=1)
STATE = {"speculative_num_steps": 4, "version": "x"}


def load():
    """Set SGLang up as far as the plugin touches it, and load the plugin by SGLang's own loader."""
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.managers"):
        package(name)
    package("sglang.srt.debug_utils")
    package("sglang.srt.debug_utils.cuda_coredump")
    package("sglang.srt.utils", log_info_on_rank0=lambda logger, text: None)
    package("sglang.srt.arg_groups")
    same = lambda args: args  # noqa: E731
    package("sglang.srt.arg_groups.overrides", resolved_view=same, resolving_view=same)
    context = SimpleNamespace(resolved_server_args_dict=lambda: dict(STATE))
    package(
        "sglang.srt.runtime_context",
        attn_dp_enabled_of=lambda _: False,
        get_spec=lambda: SPEC,
        get_context=lambda: context,
    )
    package("sglang.srt.speculative.spec_info", SpeculativeAlgorithm=object)
    package("sglang.srt.managers.io_struct", SetInternalStateReqOutput=Output, GetInternalStateReqOutput=Output)
    spec_utils = package("sglang.srt.speculative.spec_utils")
    vars(spec_utils).update(get_spec=lambda: SPEC)
    cut("sglang/srt/speculative/spec_utils.py", "resolve_num_tokens_per_req", scope=vars(spec_utils))
    user = types.ModuleType("a_module_that_imported_it_before")
    user.resolve_num_tokens_per_req = spec_utils.resolve_num_tokens_per_req
    sys.modules[user.__name__] = user

    scheduler = package("sglang.srt.managers.scheduler")
    vars(scheduler).update(
        SetInternalStateReqOutput=Output,
        GetInternalStateReqOutput=Output,
        get_context=lambda: context,
        logging=SimpleNamespace(warning=lambda text: None),
    )
    functions = cut(
        "sglang/srt/managers/scheduler.py",
        "set_internal_state",
        "get_internal_state",
        scope=vars(scheduler),
        inside="Scheduler",
    )
    scheduler.Scheduler = type("Scheduler", (), {function.__name__: function for function in functions})

    importlib.import_module("sglang.srt.plugins").load_plugins()
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


class Worker:
    """Notes the runtime states that SGLang's controller builds and applies."""

    def __init__(self, steps=4):
        self.speculative_num_steps = steps
        self.graphs = {}
        self.applied = []

    def build_adaptive_runtime_state(self, speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs=None):
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        self.graphs[speculative_num_steps] = cuda_graph_bs
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state):
        if state.speculative_num_steps != self.speculative_num_steps:
            self.applied.append(state.speculative_num_steps)
            self.speculative_num_steps = state.speculative_num_steps


class Readback:
    """Where 0.5.23's Scheduler passes the two requests on to."""

    def get_internal_state(self, request):
        return Output(internal_state=dict(STATE))

    def set_internal_state(self, request):
        return Output(updated="passed on")


def server(config, steps=4, **args):
    """A scheduler with a speculative worker, as SGLang would put them together."""
    from sglang.srt.speculative import adaptive_runtime_state as runtime
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    worker = Worker(steps)
    if "policy" in inspect.signature(runtime.AdaptiveController).parameters:
        policy = AdaptiveSpeculativeParams(initial_steps=steps, cfg_path=config)
        controller = runtime.AdaptiveController(worker, policy)
    else:
        controller = runtime.AdaptiveController(worker, config_path=config)
    controller.register(SimpleNamespace(speculative_num_steps=steps))
    controller.init_states([1, 2, 4, 8])
    worker.adaptive_controller = controller
    return scheduler(worker, **args)


def scheduler(worker, pp_size=1):
    from sglang.srt.managers.scheduler import Scheduler

    made = Scheduler()
    made.server_args = SimpleNamespace(pp_size=pp_size)
    made.draft_worker = worker
    made.internal_state = Readback()
    return made


def ask(scheduler, **settings):
    return scheduler.set_internal_state(SimpleNamespace(server_args=settings)).updated


def step(scheduler, running):
    """The head of a decode step, as ``EAGLEWorkerV2.forward_batch_generation`` begins it."""
    scheduler.draft_worker.adaptive_controller.activate_step_by_batch(running)
    return scheduler.draft_worker.speculative_num_steps


def verified(scheduler, correct):
    scheduler.draft_worker.adaptive_controller.on_verify_complete(correct, batch_size=len(correct))


def plugin_report(scheduler):
    """By the plugin's hook around a stub: the rest of 0.5.17's get_internal_state reads memory pools."""
    from kit.draftwidth import plugin

    stub = lambda self, request: Output(internal_state={})  # noqa: E731
    return plugin.get_internal_state(stub, scheduler, SimpleNamespace()).internal_state["draft_width"]


def switching(config):
    one = server(config)
    assert plugin_report(one)["candidates"] == [0, 1, 2, 4]
    # Every candidate has graphs of every size, since any may be asked for at any load.
    assert one.draft_worker.graphs == {0: [1, 2, 4, 8], 1: [1, 2, 4, 8], 2: [1, 2, 4, 8]}
    assert step(one, 3) == 4
    assert ask(one, draft_width=2) is True
    assert one.draft_worker.speculative_num_steps == 4, "the handler must not switch by itself"
    assert plugin_report(one)["asked"] == 2 and plugin_report(one)["in_use"] == 4
    assert step(one, 3) == 2 and step(one, 8) == 2
    for width in (0, 1, 4, 0):
        assert ask(one, draft_width=width) is True and step(one, 5) == width
    verified(one, [0, 0])
    assert one.draft_worker.speculative_num_steps == 0, "a fixed width must not adapt"
    found = plugin_report(one)
    assert found["counts"]["2"] == {"steps": 2, "requests": 11, "verified": 0, "accepted": 0}
    assert found["counts"]["0"] == {"steps": 2, "requests": 10, "verified": 2, "accepted": 0}


def refusing(config):
    one = server(config)
    for wish, reason in (
        ({"draft_width": 3}, "one of [0, 1, 2, 4]"),
        ({"draft_width": -7}, "one of [0, 1, 2, 4]"),
        ({"draft_width": 2.5}, "got 2.5"),
        ({"draft_width": -1}, "no width policy"),
        ({"draft_width": 2, "pp_max_micro_batch_size": 8}, "not together with pp_max_micro_batch_size"),
        ({"draft_width": -1, "draft_width.from.1": 3}, "asks for widths [3]; the candidates are [0, 1, 2, 4]"),
        ({"draft_width": 2, "draft_width.from.1": 4}, "go with draft_width = -1"),
        ({"draft_width.from.1": 4}, "got None"),
    ):
        assert ask(one, **wish) is False, wish
        refused = plugin_report(one)["refused"]
        assert reason in refused["reason"] and refused["asked"] == wish, refused
    assert step(one, 1) == 4, "a refusal must change nothing"
    assert ask(one, draft_width=1) is True and plugin_report(one)["refused"] is None
    # Settings that are not the plugin's reach SGLang.
    assert ask(one, something_else=1) in (False, "passed on")


def inactive(config):
    plain = scheduler(None)
    assert ask(plain, draft_width=0) is False
    found = plugin_report(plain)
    assert found["active"] is False and "without speculative decoding" in found["reason"]
    static = scheduler(SimpleNamespace(adaptive_controller=None))
    assert ask(static, draft_width=2) is False and "one width only" in plugin_report(static)["reason"]
    piped = server(config, pp_size=2)
    assert ask(piped, draft_width=2) is False and "pipeline" in plugin_report(piped)["reason"]


def policy(config):
    table = {"draft_width.from.1": 4, "draft_width.from.4": 1, "draft_width.from.8": 0}
    ranks = [server(config), server(config)]
    for rank in ranks:
        assert ask(rank, draft_width=-1, **table, **{"draft_width.dwell_steps": 2}) is True
        assert plugin_report(rank)["policy"]["draft_width.from.8"] == 0
    loads = [1, 1, 5, 5, 5, 9, 1, 9, 9, 9, 1, 1, 1]
    widths = [[step(rank, load) for load in loads] for rank in ranks]
    assert widths[0] == widths[1], "ranks that see the same batches must choose alike"
    assert widths[0] == [4, 4, 4, 1, 1, 1, 1, 1, 0, 0, 0, 4, 4], widths[0]
    assert ask(ranks[0], draft_width=2) is True and step(ranks[0], 9) == 2


def policy_file(config):
    one = server(config)  # KIT_DRAFT_WIDTH_POLICY is set
    assert plugin_report(one)["mode"] == "auto" and step(one, 1) == 2


def own_algorithm(config):
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    one = server(config)
    original = AdaptiveSpeculativeParams.__mro__[1](4, config)
    original.set_cuda_graph_bs([1, 2, 4, 8])
    assert ask(one, draft_width=-2) is True
    for number in range(120):
        correct = [0, 0, 0] if number < 60 else [original.get_steps_for_batch(3)] * 3
        assert step(one, 3) == original.get_steps_for_batch(3)
        verified(one, correct)
        original.on_verify_complete(correct, 3)
    assert {0, 4} <= set(one.draft_worker.applied), "the feed is meant to move it both ways"


def unnamed(config):
    one = server(config)  # SGLANG_PLUGINS is not set
    assert not hasattr(one.draft_worker.adaptive_controller.params, "width_control")
    assert ask(one, draft_width=2) in (False, "passed on")


def draft_extend_graph(config):
    from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req as resolve

    startup = SimpleNamespace(speculative_num_draft_tokens=5, speculative_eagle_topk=1, speculative_adaptive=True)
    takes = "server_args" in inspect.signature(resolve.__wrapped__).parameters
    given = {"server_args": startup} if takes else {}
    SPEC.speculative_num_draft_tokens = 2  # as while the state of width 1 is being built
    assert resolve(phase="draft_extend", **given) == 2
    assert resolve(phase="draft_decode", **given) == 1
    seen = sys.modules["a_module_that_imported_it_before"].resolve_num_tokens_per_req
    assert seen(phase="draft_extend", **given) == 2
    if takes:
        startup.speculative_adaptive = False
        assert resolve(phase="draft_extend", **given) == 5


def main():
    registry = load()
    wanted = 0 if sys.argv[2] == "unnamed" else 4
    assert len(registry._patched) == wanted, f"hooks applied: {sorted(registry._patched)}"
    globals()[sys.argv[2]](sys.argv[3])
    print("ok")


if __name__ == "__main__":
    main()
