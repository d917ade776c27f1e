"""Interpose on an installed ExLlamaV3 so that MTP-cache population is deferred, or its inputs no longer block.

**The fault.** After every prompt chunk ``Job.prefill`` runs the MTP head over the chunk to fill the draft cache. On a
layer split the head's input (the target's last hidden state) is on the last GPU and its embedding rows come from the
host, so the first GPU waits for the last one once per chunk and the pipeline between them never fills.

**Deferring** (`install`). The MTP passes of up to ``depth`` chunks wait in one queue per generator and are replayed in
order, each with the arguments it was called with. Replayed chunk by chunk, the draft cache ends bit-identical to
stock's.

**Unblocking** (`unblock`). The passes stay where they are but their inputs travel without blocking
(`kit.deferred.uploads`). Both can be on at once.

**What must hold.** Drafts never change the output (the target verifies every token), so a stale draft cache does not
fail: it silently costs acceptance, and if it reaches the CPU or disk tier it costs acceptance for ever. The rule is
therefore that *nobody who reads the draft cache can tell a deferred generator from a stock one*. These read it, and
each empties the queue first:

* ``draft_forward``: drafting (``draft_model.forward``);
* ``draft_prefill``: MTP passes outside prompt prefill, after tokens were accepted;
* ``prefill_end``: the end of a job's prompt; inside ``Job.prefill``, so the cost is in the time to first token;
* ``copy_page``: a partly matching page is copied, draft half included;
* ``store``: a page goes to the CPU tier and from there to disk (eviction, write-behind, idle flush, close);
* ``hash_swap``: a page is exchanged for its twin and released, while a queued pass would still write it;
* ``deallocate``: a job lets go of its pages, which stay reusable: end, cancel, clear, requeue, failure. After the last
  job the page table may be defragmented; by then the queue is empty.

A queue is dropped, never written, when its generator no longer owns the cache, when the cache is unloaded, when the
generator closes, and when an exception leaves ``iterate``. If a flush fails while pages are let go (out of memory, say)
the queue is dropped too, the original exception stands, and the pages whose draft half was never written are cleared
rather than left for reuse.

**How.** Methods are wrapped, not replaced, with their arguments passed through: ``Job.prefill`` differs between
releases, the call it makes does not. The draft model, the draft cache, the CPU tier and the target are shimmed per
instance. Nothing here synchronises a device: replays run on the streams the passes always run on.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from kit.errors import KitError

from .queue import DeferredQueue, DropReason, FlushReason

if TYPE_CHECKING:
    import torch

    from .hold import Held, Where
    from .uploads import Unblocker

logger = logging.getLogger(__name__)

SUPPORTED = ("1.4.1", "1.6.5")
"""First and last ExLlamaV3 release whose sources were checked. `tests/test_deferred_scheduling.py` was run on the
schedulers of 1.4.1, 1.4.8, 1.5.0, 1.5.3, 1.6.0, 1.6.4 and 1.6.5 (on the older ones without what they do not have: close
and hash_completed_page came with 1.6, the disk tier later, containment of a job's failure with 1.5)."""

MIB = 1024**2
DEFAULT_MAX_BYTES = {"device": 512 * MIB, "pinned": 4096 * MIB}
"""Autosplit does not budget for the queue, so it is bounded in bytes as well as in chunks. A chunk of 3072 tokens at
hidden size 5120 is 30 MiB: 512 MiB hold 17 of them."""

COALESCED_TOKENS = 16384
"""Longest coalesced MTP pass. Its activations grow with it: the MLP's alone are tokens × intermediate size × 2
bytes."""

ENGINE = "exllamav3"
_STATE = "_kit_deferred"


class DeferError(KitError):
    """Deferring cannot be installed or was asked for with values that make no sense."""


@dataclass(frozen=True)
class Settings:
    """What is interposed. See `install` for the fields."""

    depth: int | None = 1
    max_bytes: int | None = None
    where: Where = "device"
    coalesce: bool = False
    rolling: bool = False
    unblock: bool = False
    skip_single_device: bool = True

    def __post_init__(self) -> None:
        if self.depth is not None and (not isinstance(self.depth, int) or self.depth < 1):
            raise DeferError(
                f"defer depth {self.depth!r}: give a whole number of chunks, 1 (stock) or more, or None to defer the "
                "whole prompt"
            )
        if self.where not in DEFAULT_MAX_BYTES:
            raise DeferError(f"where={self.where!r}: queued rows wait on the 'device' or in 'pinned' host memory")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise DeferError(f"max_bytes={self.max_bytes}: give a positive number of bytes, or None for no limit")

    @property
    def defers(self) -> bool:
        """Whether MTP passes are queued at all: a depth of 1 is stock."""
        return self.depth is None or self.depth > 1


# ------------------------------------------------------------------------------------------------------------- checking


def installed_version() -> str | None:
    """The installed ExLlamaV3 release, without importing it; None if there is none."""
    try:
        return importlib.metadata.version(ENGINE)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_problem(version: str | None) -> str | None:
    """Why this release is not supported, or None if it is."""
    first, last = SUPPORTED
    if version is None:
        return f"{ENGINE} is not installed here; install a release from {first} to {last}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
    if not _release(first) <= numbers <= _release(last):
        return f"{ENGINE} {version} is outside the checked range, {first} to {last}"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def source_problems(job_source: str, generator_source: str) -> list[str]:
    """What the interposition relies on and these sources lack; empty when all is there.

    Args:
        job_source: Text of ``exllamav3/generator/job.py``.
        generator_source: Text of ``exllamav3/generator/generator.py``.
    """
    problems = []
    job = _methods(job_source, "Job")
    generator = _methods(generator_source, "Generator")
    for name in ("prefill", "deallocate_pages", "is_prefill_done"):
        if name not in job:
            problems.append(f"Job.{name} is missing")
    for name in ("__init__", "iterate"):
        if name not in generator:
            problems.append(f"Generator.{name} is missing")
    prefill = job.get("prefill")
    if prefill is not None:
        calls = _draft_prefill_calls(prefill)
        if len(calls) != 1:
            problems.append(f"Job.prefill calls draft_model.prefill {len(calls)} times; expected once per chunk")
        for call in calls:
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            if not {"input_ids", "params"} <= keywords.keys():
                problems.append("Job.prefill calls draft_model.prefill without input_ids= and params=")
                continue
            params = keywords["params"]
            keys = (
                {k.value for k in params.keys if isinstance(k, ast.Constant)} if isinstance(params, ast.Dict) else set()
            )
            missing = {"target_hidden", "block_table", "cache", "cache_seqlens"} - keys
            if missing:
                problems.append(f"Job.prefill's draft_model.prefill params lack {', '.join(sorted(missing))}")
        if "mtp_carry_hidden" not in {n.attr for n in ast.walk(prefill) if isinstance(n, ast.Attribute)}:
            problems.append("Job.prefill has no mtp_carry_hidden: the shifted hidden state is made elsewhere")
    return problems


def _methods(source: str, class_name: str) -> dict[str, ast.FunctionDef]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    return {}


def _draft_prefill_calls(function: ast.FunctionDef) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "prefill"
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "draft_model"
    ]


# ------------------------------------------------------------------------------------------------------- one generator


@dataclass(slots=True)
class DeferredPass:
    """One postponed MTP pass: the call as it was made, with its hidden state put aside."""

    input_ids: torch.Tensor
    params: dict[str, Any]
    hidden: Held

    @property
    def start(self) -> int:
        """Position in the sequence of the pass's first token."""
        return int(self.params["cache_seqlens"][0])

    @property
    def length(self) -> int:
        """Tokens in the pass."""
        return self.input_ids.shape[-1]

    def continues(self, before: DeferredPass) -> bool:
        """Whether this pass follows ``before`` in the same sequence without a gap, so that both can run as one."""
        return (
            self.params["block_table"] is before.params["block_table"]
            and self.params.get("indexed_embeddings") is before.params.get("indexed_embeddings")
            and self.input_ids.shape[0] == before.input_ids.shape[0] == 1
            and self.start == before.start + before.length
        )

    def pages(self, page_size: int) -> set[int]:
        """Physical indices of the cache pages that the pass writes."""
        first, last = self.start // page_size, (self.start + self.length - 1) // page_size
        return set(self.params["block_table"][:, first : last + 1].flatten().tolist())


class Interposition:
    """What is interposed on one generator: its queue, its unblocker, and the job whose prompt is being ingested."""

    def __init__(self, generator: Any, settings: Settings) -> None:
        from exllamav3.constants import PAGE_SIZE

        self._generator = weakref.ref(generator)
        self.settings = settings
        self.bypass = bypass_reason(generator, settings)
        self.prefilling = False
        self._page_size = PAGE_SIZE
        self._stale_pages: dict[int, Any] = {}
        self._draft_device = _device(generator.draft_model.modules[0]) if generator.draft_model is not None else None
        self.unblocker = _make_unblocker(generator, self._draft_device) if settings.unblock else None
        self.queue: DeferredQueue[DeferredPass] = DeferredQueue(
            self._replay,
            depth=settings.depth,
            max_bytes=settings.max_bytes,
            rolling=settings.rolling,
            group=self._coalesce if settings.coalesce else lambda pending: 1,
            guard=self._forbidden,
        )
        self._draft_prefill: Callable[..., Any] | None = None

    # -- queueing

    def draft_prefill(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``draft_model.prefill`` as the generator and its jobs see it."""
        input_ids, params = _call_arguments(args, kwargs)
        if not self.prefilling:
            self.queue.flush(FlushReason.DRAFT_PREFILL)
            return original(*args, **kwargs)
        if not self._deferrable(params):
            self.queue.flush(FlushReason.DRAFT_PREFILL)
            return self._run(original, input_ids, params)
        from .hold import hold

        self._draft_prefill = original
        params = dict(params)
        hidden = hold(params.pop("target_hidden"), self.settings.where)
        # The ids are a view of the sequence's growing buffer.
        self.queue.push(DeferredPass(input_ids.clone(), params, hidden), hidden.nbytes)
        return None

    def _deferrable(self, params: dict[str, Any]) -> bool:
        generator = self._generator()
        return (
            self.settings.defers
            and self.bypass is None
            and generator is not None
            and params.get("target_hidden") is not None
            and params.get("cache") is generator.draft_cache
            # A recurrent draft state is stashed by position while the pass would still be pending.
            and params.get("recurrent_states") is None
        )

    # -- replaying

    def _run(self, draft_prefill: Callable[..., Any], input_ids: torch.Tensor, params: dict[str, Any]) -> Any:
        with self.unblocker.draft_pass(params) if self.unblocker is not None else nullcontext():
            return draft_prefill(input_ids=input_ids, params=params)

    def _replay(self, group: list[DeferredPass]) -> None:
        import torch

        first = group[0]
        # Cancelling a job, or closing, is not in inference mode; the passes always are.
        with torch.inference_mode():
            hidden = [item.hidden.fetch(self._draft_device) for item in group]
            ids = [item.input_ids for item in group]
            params = dict(first.params)
            params["target_hidden"] = hidden[0] if len(group) == 1 else torch.cat(hidden, dim=1)
            assert self._draft_prefill is not None
            self._run(self._draft_prefill, ids[0] if len(group) == 1 else torch.cat(ids, dim=-1), params)

    def _coalesce(self, pending: Sequence[DeferredPass]) -> int:
        size, tokens = 1, pending[0].length
        for before, item in pairwise(pending):
            tokens += item.length
            if tokens > COALESCED_TOKENS or not item.continues(before):
                break
            size += 1
        return size

    def _forbidden(self) -> DropReason | None:
        generator = self._generator()
        if generator is None or not _owns_cache(generator):
            return DropReason.SUPERSEDED
        if not (_initialized(generator.cache) and _initialized(generator.draft_cache)):
            return DropReason.UNLOADED
        return None

    # -- letting go

    def settle(self) -> None:
        """Flush before pages are let go, or drop the queue if that fails. Never raises: the caller has its own."""
        try:
            self.queue.flush(FlushReason.DEALLOCATE)
        except Exception:
            logger.warning("a deferred MTP pass failed while pages were let go; dropping the queue", exc_info=True)
            self.abandon(DropReason.FLUSH_FAILED)

    def abandon(self, reason: DropReason) -> None:
        """Drop the queue and remember the pages whose draft half will never be written."""
        forbidden = self._forbidden()
        dropped = self.queue.drop(forbidden or reason)
        generator = self._generator()
        if generator is None or forbidden is not None:
            return  # these pages are no longer this generator's
        indices = set().union(*(item.pages(self._page_size) for item in dropped))
        for page in generator.pagetable.all_pages:
            if page.page_index in indices:
                page.persistable = False  # the disk tier leaves it alone
                self._stale_pages[id(page)] = page

    def clear_stale_pages(self) -> None:
        """Take pages whose draft half was never written out of the prompt cache, once no job refers to them."""
        for key, page in list(self._stale_pages.items()):
            if page.ref_count == 0:
                page.clear()
                del self._stale_pages[key]


def bypass_reason(generator: Any, settings: Settings) -> str | None:
    """Why this generator's MTP passes are not deferred, or None if they are."""
    draft = generator.draft_model
    if draft is None:
        return "no draft model"
    if getattr(generator, "dflash_draft", False):
        return "DFlash drafter: its cache is not filled by prefill passes"
    if not getattr(generator, "mtp_draft", False):
        return "autoregressive draft model: it reads no target hidden state"
    if draft.caps.get("draft_uses_target_cache"):
        return "the drafter reads the target's cache and has none of its own"
    if generator.model.loaded_tp:
        return "tensor parallel: every GPU works on every chunk, so there is no pipeline to interrupt"
    if settings.skip_single_device and len(_devices(generator)) < 2:
        return "one device: there is no pipeline to interrupt"
    return None


def _devices(generator: Any) -> set[str]:
    models = (generator.model, generator.draft_model)
    found = {_device(module) for model in models for module in model.modules}
    return {str(device) for device in found if device is not None and device.type != "cpu"}


def _device(module: Any) -> torch.device | None:
    import torch

    device = getattr(module, "device", None)
    return None if device is None else torch.device(device)


def _make_unblocker(generator: Any, draft_device: torch.device | None) -> Unblocker | None:
    from .uploads import Unblocker

    if generator.model.loaded_tp:
        return None
    modules = generator.model.modules
    return Unblocker(_device(modules[1]) if len(modules) > 1 else None, draft_device)


def _owns_cache(generator: Any) -> bool:
    owner = getattr(generator.cache, "owner_serial", None)
    return owner is None or owner == getattr(generator, "cache_owner_serial", owner)


def _initialized(cache: Any) -> bool:
    # The flag came with 1.5; before it, an unloaded cache shows as layers without tensors.
    flag = getattr(cache, "initialized", None)
    if flag is not None:
        return bool(flag)
    return all(tensor is not None for tensor in cache.get_all_tensors())


def _call_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = ("input_ids", "params")
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("input_ids"), given.get("params") or {}


# ------------------------------------------------------------------------------------------------------- interposing


class _Patch:
    """What has been wrapped and shimmed in this process, so that it can be taken out again."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.classes: list[tuple[type, str, Any]] = []
        self.shims: list[tuple[weakref.ref, str]] = []
        self.generators: weakref.WeakSet[Any] = weakref.WeakSet()


_patch = _Patch()


def install(
    depth: int | None = 8,
    max_bytes: int | Literal["auto"] | None = "auto",
    where: Where = "device",
    coalesce: bool = False,
    *,
    rolling: bool = False,
    skip_single_device: bool = True,
    on_mismatch: Literal["raise", "warn"] = "raise",
) -> bool:
    """Defer MTP-cache population in every ExLlamaV3 generator of this process, existing ones included.

    Args:
        depth: Chunks whose MTP passes wait before they are replayed; 1 is stock, None defers the whole prompt.
        max_bytes: Most bytes of hidden state that wait, whatever the depth; None for no limit, "auto" for
            `DEFAULT_MAX_BYTES`.
        where: Where they wait: on their "device", or in "pinned" host memory (asynchronous copies).
        coalesce: Replay neighbouring chunks of a sequence as one longer pass. Other kernel shapes round differently, so
            the draft cache is then close to stock's and not bit-identical; the output still is what the target says.
        rolling: When the queue is full replay the oldest pass only, not all of them. The queue then stays one pass
        short of full, and what is replayed is always a few chunks old. That pays where a queued row is ready before its
            pass runs, that is, with ``where="pinned"`` (its copy follows its chunk at once) and the MTP head on the
            first GPU: no chunk then waits for the last GPU, and a depth of 2 or 3 is enough. With ``where="device"``
            the row moves when its pass runs, behind the last GPU's newest chunk, and rolling would wait for that every
            time.
        skip_single_device: Leave a generator alone whose layers are all on one device, where deferring wins nothing.
        on_mismatch: What to do when the installed ExLlamaV3 is not one this was written for. Either way stock behaviour
            stays in place.

    Returns:
        Whether it is installed (False only with ``on_mismatch="warn"``).

    Raises:
        DeferError: For values that make no sense, or an ExLlamaV3 without the expected calls.
    """
    limit = DEFAULT_MAX_BYTES.get(where) if max_bytes == "auto" else max_bytes
    keep_unblocked = _patch.settings is not None and _patch.settings.unblock
    return _apply(Settings(depth, limit, where, coalesce, rolling, keep_unblocked, skip_single_device), on_mismatch)


def unblock(*, on_mismatch: Literal["raise", "warn"] = "raise") -> bool:
    """Upload prefill inputs without blocking, in every ExLlamaV3 generator of this process; combines with `install`.

    Raises:
        DeferError: See `install`.
    """
    return _apply(replace(_patch.settings or Settings(), unblock=True), on_mismatch)


def uninstall() -> None:
    """Take everything out: queues are flushed, wrapped methods and shimmed instances are as they were."""
    for generator in list(_patch.generators):
        state = generator.__dict__.pop(_STATE, None)
        if state is not None:
            state.queue.flush(FlushReason.UNINSTALL)
    _patch.generators.clear()
    for owner, name, original in reversed(_patch.classes):
        setattr(owner, name, original)
    _patch.classes.clear()
    for reference, name in reversed(_patch.shims):
        instance = reference()
        if instance is not None:
            instance.__dict__.pop(name, None)
    _patch.shims.clear()
    _patch.settings = None


def installed() -> Settings | None:
    """What is interposed now; None when ExLlamaV3 is stock."""
    return _patch.settings


def counters(generator: Any) -> dict[str, Any] | None:
    """A generator's counters as plain data, with why it was bypassed (None if it wasn't); None if nothing is
    interposed.

    Args:
        generator: A ``Generator`` or an ``AsyncGenerator``.
    """
    state = getattr(getattr(generator, "generator", generator), _STATE, None)
    if state is None:
        return None
    uploads = state.unblocker.uploads if state.unblocker is not None else None
    return {**state.queue.counters.as_dict(), "bypass": state.bypass, "unblocked_uploads": uploads}


def _apply(settings: Settings, on_mismatch: Literal["raise", "warn"]) -> bool:
    problem = version_problem(installed_version())
    problems = [problem] if problem else []
    if not problems:
        job = importlib.import_module(f"{ENGINE}.generator.job")
        generator = importlib.import_module(f"{ENGINE}.generator.generator")
        problems = source_problems(inspect.getsource(job), inspect.getsource(generator))
    if problems:
        message = f"MTP prefill stays stock: {'; '.join(problems)}"
        if on_mismatch == "raise":
            raise DeferError(message)
        logger.warning("%s", message)
        return False
    uninstall()
    _patch.settings = settings
    _wrap_classes(generator.Generator, job.Job)
    return True


def _wrap_classes(generator_class: type, job_class: type) -> None:
    _wrap(generator_class, "__init__", _generator_init)
    _wrap(generator_class, "iterate", _generator_iterate)
    _wrap(generator_class, "close", _generator_close)
    _wrap(job_class, "prefill", _job_prefill)
    _wrap(job_class, "deallocate_pages", _job_deallocate_pages)
    _wrap(job_class, "hash_completed_page", _job_hash_completed_page)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = owner.__dict__.get(name)
    if original is None:  # close and hash_completed_page came with 1.6
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    _patch.classes.append((owner, name, original))
    setattr(owner, name, wrapped)


def _generator_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for other in list(_patch.generators):
        if other is not self and (other.cache is self.cache or other.draft_cache is self.draft_cache is not None):
            other.__dict__[_STATE].queue.drop(DropReason.SUPERSEDED)
    bind(self)


def _generator_iterate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    state = bind(self)
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        # Nothing may run the queue after this: the async generator ends here, a superseded one must not write.
        state.abandon(DropReason.ITERATE_FAILED)
        raise


def _generator_close(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    state = bind(self)
    try:
        # What closing persists goes through the CPU tier's store, which flushes.
        return original(self, *args, **kwargs)
    finally:
        state.queue.drop(DropReason.CLOSED)


def _job_prefill(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    state = bind(self.generator)
    state.prefilling = True
    try:
        result = original(self, *args, **kwargs)
    finally:
        state.prefilling = False
    if self.is_prefill_done():
        state.queue.flush(FlushReason.PREFILL_END)
    return result


def _job_deallocate_pages(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(self, "generator", None) is None:  # never enqueued
        return original(self, *args, **kwargs)
    state = bind(self.generator)
    state.settle()
    result = original(self, *args, **kwargs)
    state.clear_stale_pages()
    return result


def _job_hash_completed_page(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    bind(self.generator).queue.flush(FlushReason.HASH_SWAP)
    return original(self, *args, **kwargs)


def bind(generator: Any) -> Interposition:
    """The generator's interposition, made and shimmed in at first sight (generators older than `install` included)."""
    state = generator.__dict__.get(_STATE)
    if state is not None:
        return state
    state = Interposition(generator, _patch.settings or Settings())
    generator.__dict__[_STATE] = state
    _patch.generators.add(generator)
    # The models and caches outlive a generator, so their shims find the newest one by weak reference.
    if generator.draft_model is not None:
        _shim(generator.draft_model, "prefill", state, _shim_draft_prefill)
        _shim(generator.draft_model, "forward", state, _flush_first(FlushReason.DRAFT_FORWARD))
    if generator.draft_cache is not None:
        _shim(generator.draft_cache, "copy_page", state, _flush_first(FlushReason.COPY_PAGE))
    if getattr(generator, "cpu_page_cache", None) is not None:
        _shim(generator.cpu_page_cache, "store", state, _flush_first(FlushReason.STORE))
    if state.unblocker is not None:
        _shim(generator.model, "forward", state, _shim_target_pass)
        _shim(generator.model, "prefill", state, _shim_target_pass)
        _shim(generator.model.modules[0], "forward", state, _shim_embedding)
    if state.bypass is not None and state.settings.defers:
        logger.info("MTP prefill stays stock for this generator: %s", state.bypass)
    return state


def _shim(instance: Any, name: str, state: Interposition, shim: Callable[..., Any]) -> None:
    instance.__dict__.pop(name, None)
    original = getattr(instance, name)  # the class's method, bound
    newest = weakref.ref(state)

    @functools.wraps(original)
    def shimmed(*args: Any, **kwargs: Any) -> Any:
        current = newest()
        return original(*args, **kwargs) if current is None else shim(current, original, *args, **kwargs)

    instance.__dict__[name] = shimmed
    _patch.shims.append((weakref.ref(instance), name))


def _shim_draft_prefill(state: Interposition, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return state.draft_prefill(original, *args, **kwargs)


def _flush_first(reason: FlushReason) -> Callable[..., Any]:
    def shim(state: Interposition, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state.queue.flush(reason)
        return original(*args, **kwargs)

    return shim


def _shim_target_pass(state: Interposition, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not state.prefilling or state.unblocker is None:
        return original(*args, **kwargs)
    _, params = _call_arguments(args, kwargs)
    with state.unblocker.target_pass(params):
        return original(*args, **kwargs)


def _shim_embedding(state: Interposition, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if state.unblocker is None else state.unblocker.embed(original, *args, **kwargs)
