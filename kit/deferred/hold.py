"""Where a queued hidden state waits: on its own device, or in pinned host memory.

Runs inside the engine's process (imports torch).

**Pinned.** The copy to the host goes on the source device's *current* stream, not on one of its own. That costs the
last GPU a millisecond or two per chunk (30 MiB over its link, against a chunk of hundreds of milliseconds), and in
return the device memory is free, in stream order, the moment the copy is enqueued: no ``record_stream``, and no hidden
states pile up on the device when the host runs ahead. An event marks the copy; the stream that later uploads the rows
waits for the event, the host never does. Torch's pinned allocator keeps a block until the copies out of it have run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Where = Literal["device", "pinned"]


class Held(Protocol):
    """A tensor put aside."""

    nbytes: int

    def fetch(self, device: torch.device | None) -> torch.Tensor:
        """The tensor, ready to be read in stream order on ``device`` (None: wherever it is)."""
        ...


@dataclass(slots=True)
class OnDevice:
    """Held by reference, where it was made."""

    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return self.tensor.nbytes

    def fetch(self, device: torch.device | None) -> torch.Tensor:
        """The tensor itself: the model moves it, exactly as it does when nothing is deferred."""
        return self.tensor


@dataclass(slots=True)
class InPinnedMemory:
    """Held in pinned host memory; ``copied`` is the event after the copy (None for a tensor that was on the host)."""

    host: torch.Tensor
    home: torch.device
    copied: torch.cuda.Event | None

    @property
    def nbytes(self) -> int:
        """Host bytes held."""
        return self.host.nbytes

    def fetch(self, device: torch.device | None) -> torch.Tensor:
        """A copy on ``device`` (None: the device it came from), uploaded without blocking the host."""
        target = self.home if device is None else device
        if target.type != "cuda":
            return self.host
        if self.copied is not None:
            torch.cuda.current_stream(target).wait_event(self.copied)
        return self.host.to(target, non_blocking=True)


def pinned_empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in pinned host memory."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def hold(tensor: torch.Tensor, where: Where) -> Held:
    """Put ``tensor`` aside. The caller gives it up: it must not be written afterwards."""
    if where == "device":
        return OnDevice(tensor)
    host = pinned_empty(tensor.shape, tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    copied = None
    if tensor.is_cuda:
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(tensor.device))
    return InPinnedMemory(host, tensor.device, copied)
