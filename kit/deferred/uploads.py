"""Prefill inputs that reach the GPU without stopping the host or another GPU.

Runs inside the engine's process (imports torch).

During prefill ExLlamaV3 uploads three things per forward pass from pageable memory: the block table, the cache lengths
and the embedding rows (the embedding table lives on the CPU). A copy from pageable memory returns only when the stream
has reached it, so the host waits for that GPU to drain before it can hand the next GPU, or the next chunk, its work.
For the MTP pass the wait is worst: its rows follow the target's hidden state, so the host waits for the *last* GPU's
chunk.

`Unblocker` changes how these inputs travel and nothing else: the tables are moved to pinned memory (``get_for_device``
then copies without blocking), and the rows that the embedding module computed are staged in a pinned buffer and
uploaded to the device that reads them. The values are the same bytes, so results are bit-identical.

Load the MTP head on the last GPU with this (in TabbyAPI ``draft_gpu_split: [0, x]``): there the target's hidden state
already is, so the first GPU never waits for the last. Running MTP on a second stream of the first GPU instead would
share ExLlamaV3's per-device scratch buffers between two streams, and corrupt them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import hold

TABLES = ("block_table", "cache_seqlens", "positions")

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
        buffer, event = self._ring.popleft() if len(self._ring) >= self._size else (None, None)
        if event is not None:
            event.synchronize()
        if buffer is None or buffer.nbytes < rows.nbytes:
            buffer = hold.pinned_empty(torch.Size([rows.nbytes]), torch.uint8)
        staged = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        staged.copy_(rows)
        event = None
        if device.type == "cuda":
            uploaded = staged.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        else:
            uploaded = staged.clone()
        self._ring.append((buffer, event))
        return uploaded


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

    def embed(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """Run the embedding module's ``forward`` and, inside a pass, send host rows to the device that reads them."""
        rows = forward(*args, **kwargs)
        if self._rows_to is None or rows.device.type != "cpu":
            return rows
        self.uploads += 1
        return self._ring.upload(rows, self._rows_to)
