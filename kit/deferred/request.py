"""One request under one arm, on a checkpoint that is loaded once. Runs in the engine's process."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kit.engines.exllamav3 import PAGE, ArmSettings, Layout, PrefillPlan
from kit.errors import KitError
from kit.records.schema import Chunk, Scalar

from . import counters, install, unblock, uninstall

UTILISATION_MS = 200
SCAN_VARIABLE = "EXL3_GDN_SUB_CHUNK"


@dataclass
class Loaded:
    """A checkpoint ready to be measured.

    Attributes:
        draft: (GPU, bits of the draft cache) → the MTP model and its cache; loaded at first use, then kept.
        gpus: Indices of the GPUs that hold layers, first to last; empty on a machine without one.
    """

    target: Any
    cache: Any
    tokenizer: Any
    draft: Callable[[str, int], tuple[Any, Any]]
    gpus: list[int]
    hidden_size: int
    resolved: dict[str, Scalar] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def cache_tokens(plan: PrefillPlan) -> int:
    """Tokens the caches must hold: the longest request with its drafts, in whole pages."""
    needed = max([*plan.lengths, plan.warm_up_tokens]) + plan.output_tokens + 2 * plan.layout.draft_tokens + 2
    return max(plan.layout.cache_tokens, -(-needed // PAGE) * PAGE + PAGE)


def scan_tokens() -> int | None:
    """Tokens per pass of the linear-attention scan in the imported engine; None where it has no such setting."""
    try:
        module = importlib.import_module("exllamav3.modules.gated_delta_net_fn.gated_delta_rule")
    except ImportError:
        return None
    return getattr(module, "_scan_sub_range", None)


def load(plan: PrefillPlan, jobs: int = 1) -> Loaded:
    """Load the checkpoint as the plan's layout says, with caches for ``jobs`` jobs at once.

    Raises KitError if it does not fit this machine or has no MTP head.
    """
    layout = plan.layout
    if layout.scan_tokens:
        os.environ[SCAN_VARIABLE] = str(layout.scan_tokens)  # read when the engine is imported
    import exllamav3
    import torch
    from exllamav3 import Cache, Config, Model, Tokenizer
    from exllamav3.version import __version__

    if layout.scan_tokens and (used := scan_tokens()) != layout.scan_tokens:
        raise KitError(
            f"this ExLlamaV3 ({__version__}) scans {used} tokens a pass, not the {layout.scan_tokens} asked for"
        )
    gpus = list(range(len(layout.split))) or [0]
    if torch.cuda.device_count() < len(gpus):
        raise KitError(f"a split over {len(gpus)} GPUs, but this machine has {torch.cuda.device_count()}")
    config = Config.from_directory(str(layout.checkpoint))
    if "mtp" not in config.model_classes:
        raise KitError(f"{layout.checkpoint}: {config.architecture} has no MTP head in ExLlamaV3 {__version__}")
    tokens = cache_tokens(plan)

    def new_cache(model: Any, bits: int) -> Any:
        quantised = {"layer_type": exllamav3.CacheLayer_quant, "k_bits": bits, "v_bits": bits} if bits < 16 else {}
        return Cache(model, max_num_tokens=tokens, max_history=layout.draft_tokens, max_batch_size=jobs, **quantised)

    target = Model.from_config(config)
    cache = new_cache(target, layout.cache_bits)
    if layout.split:
        devices = module_devices(target.modules, layout.split)
        target._load_single = lambda *_: load_modules(target, devices)
    target.load(device=torch.device("cuda", gpus[0]), progressbar=False)
    target.__dict__.pop("_load_single", None)
    target.active_devices = gpus

    drafts: dict[tuple[str, int], tuple[Any, Any]] = {}

    def draft(where: str, bits: int) -> tuple[Any, Any]:
        if (where, bits) not in drafts:
            model = Model.from_config(config, component="mtp")
            draft_cache = new_cache(model, bits)
            model.load(device=torch.device("cuda", gpus[0] if where == "first" else gpus[-1]), progressbar=False)
            model.attach_to(target)
            drafts[where, bits] = model, draft_cache
        return drafts[where, bits]

    return Loaded(
        target,
        cache,
        Tokenizer.from_config(config),
        draft,
        gpus,
        config.hidden_size,
        resolved={
            "engine": "exllamav3",
            "engine_version": __version__,
            "layout": "layer split" if len(gpus) > 1 else "one GPU",
            "split": ",".join(map(str, layout.split)) or None,
            "gpus": len(gpus),
            "cache_bits": layout.cache_bits,
            "cache_tokens": tokens,
            "chunk": layout.chunk,
            "draft_tokens": layout.draft_tokens,
            "scan_tokens": layout.scan_tokens or None,
        },
        versions={"exllamav3": __version__, "torch": torch.__version__},
    )


def module_devices(modules: Sequence[Any], split: Sequence[int]) -> list[str]:
    """A device for every module: ``split`` layers on each GPU, what comes before with the first, after with the last.

    Raises KitError if the split has another number of layers than the model.
    """
    layers = [m for m in modules if getattr(m, "layer_idx", None) is not None]
    if sum(split) != len(layers):
        raise KitError(f"split {','.join(map(str, split))} has {sum(split)} layers; the model has {len(layers)}")
    of_layer = [gpu for gpu, count in enumerate(split) for _ in range(count)]
    devices, seen = [], 0
    for module in modules:
        layer = getattr(module, "layer_idx", None) is not None
        devices.append(f"cuda:{of_layer[min(seen, len(layers) - 1)]}")
        seen += layer
    return devices


def load_modules(model: Any, devices: Sequence[str]) -> None:
    """ExLlamaV3's single-device load, with a device for each module."""
    import torch

    for module, device in zip(model.modules, devices, strict=True):
        deferred_load = module.can_defer_load()
        if deferred_load:
            model.config.stc.begin_deferred_load()
        module.load(torch.device("cpu" if module.caps.get("prefer_cpu") else device))
        if deferred_load:
            model.config.stc.end_deferred_load()


@dataclass
class Outcome:
    """What one request did."""

    sent_ns: int
    first_ns: int
    ended_ns: int
    chunks: list[Chunk]
    token_ids: list[int]
    final: dict[str, Any]
    queue: dict[str, Any] | None
    draft_sha256: str | None
    peaks: list[int]
    utilisation: list[float | None]
    passes: dict[str, float]


@contextmanager
def arm_installed(settings: ArmSettings) -> Iterator[None]:
    """What an arm interposes, for the time of a cell."""
    uninstall()
    try:
        if settings.drafting == "mtp" and settings.depth != 1:
            install(
                depth=None if settings.depth == "whole" else settings.depth,
                max_bytes=None if settings.queue_mib is None else settings.queue_mib * 2**20,
                where=settings.where,
                coalesce=settings.coalesce,
                rolling=settings.rolling,
                skip_single_device=False,
            )
        if settings.unblock:
            unblock()
        yield
    finally:
        uninstall()


def new_generator(loaded: Loaded, settings: ArmSettings, layout: Layout) -> Any:
    """A generator for one arm, on the loaded models' caches."""
    from exllamav3 import Generator

    options: dict[str, Any] = {}
    if settings.drafting == "mtp":
        model, cache = loaded.draft(settings.mtp_gpu, settings.draft_bits)
        options = {"draft_model": model, "draft_cache": cache, "num_draft_tokens": layout.draft_tokens}
    elif settings.drafting == "ngram":
        options = {"ngram_match_min": layout.ngram_min, "num_draft_tokens": layout.draft_tokens}
    return Generator(
        model=loaded.target,
        cache=loaded.cache,
        tokenizer=loaded.tokenizer,
        max_batch_size=1,
        max_chunk_size=layout.chunk,
        **options,
    )


def run_request(
    loaded: Loaded, settings: ArmSettings, layout: Layout, ids: Sequence[int], output_tokens: int
) -> Outcome:
    """Run one greedy request under an arm."""
    import torch
    from exllamav3 import Job
    from exllamav3.generator.sampler import GreedySampler

    _settle(loaded)
    passes: dict[str, float] = {}
    with arm_installed(settings), ExitStack() as stack:
        generator = new_generator(loaded, settings, layout)
        if settings.forced_sync:
            stack.enter_context(_timed_passes(loaded, generator, passes))
        usage = stack.enter_context(_Utilisation(loaded.gpus))
        prompt = torch.tensor([list(ids)], dtype=torch.long)
        job = Job(prompt, max_new_tokens=output_tokens, sampler=GreedySampler())
        table = None
        chunk_list: list[Chunk] = []
        token_ids: list[int] = []
        final: dict[str, Any] | None = None
        first_ns = None
        sent_ns = time.perf_counter_ns()
        generator.enqueue(job)
        while final is None:
            results = generator.iterate()
            now = time.perf_counter_ns()
            if job.sequences[0].allocated_pages:
                table = job.sequences[0].block_index_tensor
            for result in results:
                if result["stage"] == "error":
                    raise result["error"]
                if result["stage"] != "streaming":
                    continue
                new = result["token_ids"].flatten().tolist() if "token_ids" in result else []
                if new:
                    first_ns = first_ns or now
                    token_ids += new
                    chunk_list.append(Chunk(t_ns=now, chars=len(result.get("text", "")), tokens_so_far=len(token_ids)))
                if result["eos"]:
                    final = result
        ended_ns = time.perf_counter_ns()
        usage.stop()
        peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in loaded.gpus]
        queue = counters(generator)
        generator.close()
    digest = None
    if settings.drafting == "mtp":
        _, draft_cache = loaded.draft(settings.mtp_gpu, settings.draft_bits)
        digest = cache_digest(draft_cache, table, len(ids) - 1)
    return Outcome(
        sent_ns,
        first_ns or ended_ns,
        ended_ns,
        chunk_list,
        token_ids,
        final,
        queue,
        digest,
        peaks,
        usage.means(),
        passes,
    )


def _settle(loaded: Loaded) -> None:
    import torch

    gc.collect()
    for gpu in loaded.gpus:
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)


def cache_digest(cache: Any, block_table: Any, rows: int) -> str:
    """SHA-256 of a sequence's first ``rows`` rows in a cache, in order, over all of the cache's tensors.

    Args:
        cache: An ExLlamaV3 ``Cache``; its tensors are [pages, page size, …].
        block_table: [1, pages] physical page indices of the sequence.
        rows: Rows to read; the rows after the prompt are drafts, and differ.
    """
    digest = hashlib.sha256()
    pages = block_table[0, : -(-rows // PAGE)].long()
    for tensor in cache.get_all_tensors():
        left = rows
        for begin in range(0, len(pages), 64):
            part = tensor[pages[begin : begin + 64].to(tensor.device)]
            part = part.reshape(-1, *tensor.shape[2:])[:left]
            left -= part.shape[0]
            digest.update(part.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _timed_passes(loaded: Loaded, generator: Any, passes: dict[str, float]) -> Iterator[None]:
    """Synchronise and time every pass until the first token."""
    import torch

    def timed(instance: Any, method: str, name: str) -> None:
        original = getattr(instance, method)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if any(job.is_prefill_done() for job in generator.active_jobs):
                return original(*args, **kwargs)
            for gpu in loaded.gpus:
                torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            result = original(*args, **kwargs)
            for gpu in loaded.gpus:
                torch.cuda.synchronize(gpu)
            passes[name] = passes.get(name, 0.0) + time.perf_counter() - began
            return result

        instance.__dict__[method] = wrapper
        undo.append((instance, method))

    undo: list[tuple[Any, str]] = []
    timed(loaded.target, "forward", "target_s")
    timed(loaded.target, "prefill", "target_s")
    if generator.draft_model is not None:
        timed(generator.draft_model, "prefill", "mtp_s")
    try:
        yield
    finally:
        for instance, method in undo:
            instance.__dict__.pop(method, None)


class _Utilisation:
    """Samples of each GPU's utilisation (percent of time a kernel ran) by ``nvidia-smi``, for a request's time."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = list(gpus)
        self._process: subprocess.Popen | None = None
        self._text = ""

    def __enter__(self) -> _Utilisation:
        query = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms"]
        if self._gpus:
            try:
                self._process = subprocess.Popen(
                    [*query, str(UTILISATION_MS)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            except OSError:
                self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End sampling."""
        if self._process is not None:
            self._process.terminate()
            self._text, _ = self._process.communicate()
            self._process = None

    def means(self) -> list[float | None]:
        """Mean by GPU; None where there was no sample."""
        samples: dict[int, list[float]] = {gpu: [] for gpu in self._gpus}
        for line in self._text.splitlines():
            index, _, value = line.partition(",")
            if index.strip().isdigit() and int(index) in samples and value.strip().isdigit():
                samples[int(index)].append(float(value))
        return [sum(v) / len(v) if v else None for v in samples.values()]
