"""Prefill inputs that reach the GPU without stopping the host or another GPU.

Runs inside the engine's process (imports torch).

During prefill ExLlamaV3 uploads three things per forward pass from pageable memory: the block table, the cache lengths
and the embedding rows (the embedding table lives on the CPU). A copy from pageable memory returns only when the stream
has reached it, so the host waits for that GPU to drain before it can hand the next GPU, or the next chunk, its work.
For the MTP pass the wait is worst: its rows follow the target's hidden state, so the host waits for the *last* GPU's
chunk.

`Unblocker` changes how these inputs travel and nothing else: the tables are moved to pinned memory (``get_for_device``
then copies without blocking), and the embedding rows are staged in a pinned buffer and uploaded to the device that
reads them. The values are the same bytes, so results are bit-identical.

**Rows in the table's own type.** The embedding module gathers the rows, then converts them on the host: for a chunk of
3072 at hidden size 5120, 60 MiB of freshly allocated float32, which one thread fills, uploads and frees before it can
launch anything. A timeline on two H200s (``data/runs``, run 20261129T161202Z-exllamav3) has 38 ms of host work between
two chunks' passes, this among it, with the first GPU idle. Where nothing but gathering and converting is asked
(:func:`plain_table`), the rows are therefore gathered straight into the pinned buffer in the table's type, and
converted on the device: half the bytes, no fresh allocation. For that moment the device holds the narrow rows too
(30 MiB). The next timeline has 1 to 3 ms of the host in its place for the target's rows.

The bits stay the module's own: widening is exact wherever it is done, and bfloat16 to half, which the MTP head asks
for, rounds to nearest even on either device (so do CUDA's and torch's CPU conversions).

**With a queue as well.** A flush asks for more uploads than the ring has buffers, and the host waits for the devices
to give one back: 64 ms in a flush of eight chunks on two H200s (run 20261129T184026Z-exllamav3, ``unblock-8``).
Unblocked inputs without a queue were the better choice there.

Load the MTP head on the last GPU with this (in TabbyAPI ``draft_gpu_split: [0, x]``): there the target's hidden state
already is, so the first GPU never waits for the last. Running MTP on a second stream of the first GPU instead would
share ExLlamaV3's per-device scratch buffers between two streams, and corrupt them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import hold

TABLES = ("block_table", "cache_seqlens", "positions")

SAME_ROUNDING = {(torch.bfloat16, torch.half)}
"""Narrowing conversions that give the same bits on the CPU and on a GPU: with them the draft caches of the recorded
runs from 20261129T185910Z-exllamav3 on are stock's, byte by byte; tests/test_deferred_gpu.py compares them too."""

RING = 4
"""Buffers: the host may be this many uploads ahead of the devices before it waits for the oldest."""


class PinnedRing:
    """A few reusable pinned buffers. One is written again only after the upload out of it has run.

    A buffer grows to the largest tensor it has carried, so pinned memory is bounded by ``size`` times the largest.
    """

    def __init__(self, size: int = RING) -> None:
        self._size = size
        self._ring: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def nbytes(self) -> int:
        """Pinned bytes held."""
        return sum(buffer.nbytes for buffer, _ in self._ring)

    def upload(self, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of host tensor ``rows`` on ``device``, in order on its current stream; the host does not wait."""
        return self._send(rows.shape, rows.dtype, device, lambda staged: staged.copy_(rows))

    def gather(self, table: torch.Tensor, ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Rows ``ids`` [...] of a host ``table`` [rows, width] on ``device``, as [..., width] in the table's type."""
        flat = ids.reshape(-1)

        def fill(staged: torch.Tensor) -> None:
            torch.index_select(table, 0, flat, out=staged.view(len(flat), -1))

        return self._send(torch.Size([*ids.shape, table.shape[1]]), table.dtype, device, fill)

    def _send(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, fill: Callable[[torch.Tensor], object]
    ) -> torch.Tensor:
        nbytes = shape.numel() * dtype.itemsize
        buffer, event = self._ring.popleft() if len(self._ring) >= self._size else (None, None)
        if event is not None:
            event.synchronize()
        if buffer is None or buffer.nbytes < nbytes:
            buffer = hold.pinned_empty(torch.Size([nbytes]), torch.uint8)
        staged = buffer[:nbytes].view(dtype).view(shape)
        fill(staged)
        event = None
        if device.type == "cuda":
            uploaded = staged.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        else:
            uploaded = staged.clone()
        self._ring.append((buffer, event))
        return uploaded


def plain_table(
    module: Any, ids: torch.Tensor, params: Mapping[str, Any], out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.dtype] | None:
    """(table, type asked for) if a pass of the embedding module is no more than gathering rows and converting them.

    None for everything else: rows from disk or in a quantised table, scaled or normalised rows, images among the
    tokens, rows that a drafting loop already has, a conversion not known to give the same bits on every device. The
    engine's own code then runs.
    """
    embedding = getattr(module, "embedding", None)
    wanted = out_dtype or getattr(module, "out_dtype", None)
    if type(embedding) is not torch.nn.Embedding or wanted is None:
        return None
    table = embedding.weight
    on_host = table.device.type == ids.device.type == "cpu"
    scaled = getattr(module, "normalize", True) or getattr(module, "multiplier", None) != 1.0
    given = params.get("indexed_embeddings") or params.get("draft_embedding") is not None
    exact = torch.promote_types(table.dtype, wanted) == wanted or (table.dtype, wanted) in SAME_ROUNDING
    if not on_host or scaled or given or not exact:
        return None
    return table, wanted


class Unblocker:
    """Makes the inputs of one generator's prefill passes asynchronous.

    Args:
        first_device: The target's first layer's device.
        draft_device: The MTP head's device.
    """

    def __init__(self, first_device: torch.device | None, draft_device: torch.device | None) -> None:
        self._first_device = first_device
        self._draft_device = draft_device
        self._rows_to: torch.device | None = None
        self._ring = PinnedRing()
        self.uploads = 0

    def pin_tables(self, params: dict) -> None:
        """Replace the small host tables in ``params`` by pinned copies (in place)."""
        pinned: dict[int, torch.Tensor] = {}
        for key in TABLES:
            table = params.get(key)
            if isinstance(table, torch.Tensor) and table.device.type == "cpu":
                # The engine keys its per-device copies by identity: one tensor under two names stays one.
                if id(table) not in pinned:
                    copy = hold.pinned_empty(table.shape, table.dtype)
                    copy.copy_(table)
                    pinned[id(table)] = copy
                params[key] = pinned[id(table)]

    @contextmanager
    def target_pass(self, params: dict) -> Iterator[None]:
        """Around one forward pass of the target."""
        with self._pass(params, self._first_device):
            yield

    @contextmanager
    def draft_pass(self, params: dict) -> Iterator[None]:
        """Around one MTP pass."""
        with self._pass(params, self._draft_device):
            yield

    @contextmanager
    def _pass(self, params: dict, device: torch.device | None) -> Iterator[None]:
        self.pin_tables(params)
        outer, self._rows_to = self._rows_to, device
        try:
            yield
        finally:
            self._rows_to = outer

    def embed(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the embedding module's ``forward(x, params, out_dtype=None)`` and, inside a pass, send its host rows to
        the device that reads them."""
        if self._rows_to is None:
            return forward(*args, **kwargs)
        given = dict(zip(("x", "params", "out_dtype"), args, strict=False)) | kwargs
        ids, params = given["x"], given["params"]
        found = plain_table(getattr(forward, "__self__", None), ids, params, given.get("out_dtype"))
        if found is not None:
            table, wanted = found
            params.setdefault("input_ids", ids)  # as the module itself does
            rows = self._ring.gather(table, ids, self._rows_to).to(wanted)
        else:
            rows = forward(*args, **kwargs)
            if rows.device.type != "cpu":
                return rows
            rows = self._ring.upload(rows, self._rows_to)
        self.uploads += 1
        return rows
