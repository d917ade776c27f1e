"""What each GPU did during a few chunks of a prompt, from torch's profiler. Runs in the engine's process."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kit.engines.exllamav3 import PAGE, ArmSettings, PrefillPlan
from kit.records.schema import Arm

from .request import Loaded, arm_installed, cache_tokens, new_generator

TIMELINE_CHUNKS = 3
ITERATION = "iteration"
"""What a chunk's whole turn of the generator is annotated with."""
EMBEDDING = "embedding"
"""The label of the host's part of the input: gathering, widening and sending the embedding rows."""
WAIT_US = 200.0
"""A runtime call longer than this held the host up: launching takes a few µs, a blocking copy as long as the stream."""


def write_timeline(
    folder: Path, plan: PrefillPlan, loaded: Loaded, arm: Arm, prompt_of: Callable[[int], list[int]]
) -> None:
    """Record what each GPU did during three chunks of a prompt, around a flush where the arm has one.

    The chunks are early ones unless the plan says from which token on: attention makes each chunk of a long prompt
    dearer than the one before.

    Written as ``timeline-<arm>.json``: per GPU the spans of time in which kernels ran, labelled by the pass that
    launched them (target, mtp or other), in microseconds from the first span. Taken with torch's profiler, which
    slows the host down: the shape is what is read off, not the speed.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    settings = ArmSettings.of(arm)
    depth = settings.depth if isinstance(settings.depth, int) else 1
    skip = max(3, depth - 2, plan.timeline_from // plan.layout.chunk)
    length = min((skip + TIMELINE_CHUNKS + 3) * plan.layout.chunk, cache_tokens(plan) - 4 * PAGE)
    ids = prompt_of(length)
    from exllamav3 import Job
    from exllamav3.generator.sampler import GreedySampler

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if loaded.gpus else [])]
    with arm_installed(settings), ExitStack() as stack:
        generator = new_generator(loaded, settings, plan.layout)
        prompt = torch.tensor([ids], dtype=torch.long)
        generator.enqueue(Job(prompt, max_new_tokens=2, sampler=GreedySampler()))
        stack.enter_context(_labelled_passes(loaded, generator))
        for _ in range(skip):
            generator.iterate()
        with profile(activities=activities) as profiler:
            for _ in range(TIMELINE_CHUNKS):
                with record_function(ITERATION):
                    generator.iterate()
            for gpu in loaded.gpus:
                torch.cuda.synchronize(gpu)
        generator.clear_queue()
        generator.close()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = {"arm": arm.name, "label": arm.label, "chunk": plan.layout.chunk, "chunks": TIMELINE_CHUNKS}
    spans["from_token"] = skip * plan.layout.chunk
    spans |= gpu_spans(events)
    (folder / f"timeline-{arm.name}.json").write_text(json.dumps(spans))


@contextmanager
def _labelled_passes(loaded: Loaded, generator: Any) -> Iterator[None]:
    from torch.profiler import record_function

    undo: list[tuple[Any, str, Any]] = []

    def label(instance: Any, method: str, name: str) -> None:
        before = instance.__dict__.get(method)
        original = getattr(instance, method)

        def labelled(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"pass:{name}"):
                return original(*args, **kwargs)

        instance.__dict__[method] = labelled
        undo.append((instance, method, before))

    # Module by module, so that a deferred pass is labelled where it runs and not where it was queued.
    label(loaded.target.modules[0], "forward", EMBEDDING)
    for module in loaded.target.modules[1:]:
        label(module, "forward", "target")
    if generator.draft_model is not None:
        for module in generator.draft_model.modules:
            label(module, "forward", "mtp")
    try:
        yield
    finally:
        for instance, method, before in reversed(undo):
            if before is None:
                instance.__dict__.pop(method, None)
            else:
                instance.__dict__[method] = before


def gpu_spans(events: Sequence[dict[str, Any]], gap_us: float = 30.0) -> dict[str, Any]:
    """Busy spans of each GPU from a profiler's trace events, by the labelled pass that launched the work.

    Args:
        events: ``traceEvents`` of a chrome trace: kernels and copies, the runtime calls that launched them (tied by
            correlation id), and annotations ``pass:<label>`` (the embedding's may lie in the MTP head's, whose input
            asks it for rows) and ``iteration``.
        gap_us: Kernels of one label closer together than this are one span.

    Returns:
        ``gpus``: for each device ``spans`` [[begin, end, label], …] in µs and its ``busy`` share of the time;
        ``host``: the annotations' own spans; ``iterations``: [begin, end] of each chunk's turn; ``host_waits``: runtime
        calls of more than ``WAIT_US``, which are those that waited for a GPU, as [begin, end, call].
    """
    annotated = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "user_annotation"
    )
    passes = [(b, e, name.removeprefix("pass:")) for b, e, name in annotated if name.startswith("pass:")]
    turns = [(b, e) for b, e, name in annotated if name == ITERATION]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e.get("ph") == "X"]
    if not work and not passes:
        return {"gpus": [], "host": [], "iterations": [], "host_waits": []}
    origin = min([e["ts"] for e in work] or [passes[0][0]])
    begins = [begin for begin, _, _ in passes]

    def label_of(event: dict[str, Any]) -> str:
        when = launched.get(event["args"].get("correlation"))
        if when is None:
            return "other"
        for index in range(bisect_right(begins, when) - 1, -1, -1):
            _, end, label = passes[index]
            if when <= end:
                return "copy" if label == EMBEDDING else label  # on a GPU, the rest of the upload
            if label != EMBEDDING:  # only the embedding lies in another pass
                break
        return "other"

    by_gpu: dict[int, list[list[Any]]] = {}
    for event in sorted(work, key=lambda e: e["ts"]):
        label = "copy" if event["cat"] == "gpu_memcpy" else label_of(event)
        begin, end = event["ts"] - origin, event["ts"] - origin + event["dur"]
        spans = by_gpu.setdefault(int(event["args"].get("device", 0)), [])
        if spans and spans[-1][2] == label and begin - spans[-1][1] < gap_us:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end, label])
    waits = sorted(
        [round(e["ts"] - origin, 1), round(e["ts"] - origin + e["dur"], 1), e["name"]]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e.get("dur", 0) > WAIT_US
    )
    total = max((spans[-1][1] for spans in by_gpu.values()), default=0.0)
    host: list[list[Any]] = []
    for begin, end, label in passes:
        if host and host[-1][2] == label and begin - origin - host[-1][1] < gap_us:
            host[-1][1] = end - origin
        else:
            host.append([begin - origin, end - origin, label])
    return {
        "gpus": [
            {
                "device": gpu,
                "busy": sum(end - begin for begin, end, _ in spans) / total if total else None,
                "spans": [[round(b, 1), round(e, 1), label] for b, e, label in spans],
            }
            for gpu, spans in sorted(by_gpu.items())
        ],
        "host": [[round(b, 1), round(e, 1), label] for b, e, label in host],
        "iterations": [[round(b - origin, 1), round(e - origin, 1)] for b, e in turns],
        "host_waits": waits,
    }
