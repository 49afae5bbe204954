"""Which slots of a KV pool a batch of requests attends."""

from typing import NamedTuple

import torch
from torch import Tensor


class SlotLists(NamedTuple):
    """The slots of B requests, all in device memory, so that a captured graph follows them as they change.

    Request b has `cu_seqlens[b + 1] - cu_seqlens[b]` slots: `slots[starts[b]]` and those after it. Lists may
    lie apart, so that each can grow in its place; a request without KV here has an empty one.
    """

    slots: Tensor  # [N] int64, in any order
    starts: Tensor  # [B] int64
    cu_seqlens: Tensor  # [B + 1] int32, from 0

    @classmethod
    def of(cls, lists: list[Tensor]) -> "SlotLists":
        """Lay lists [n] int64, at least one, side by side."""
        ends = torch.tensor([0, *map(len, lists)]).cumsum(0)
        slots = torch.cat(lists)
        return cls(slots, ends[:-1].to(slots.device), ends.to(slots.device, torch.int32))

    def list_of(self, request: int) -> Tensor:
        """The slots [n] of one request. Reads device memory."""
        begin, end = self.cu_seqlens[request : request + 2].tolist()
        start = int(self.starts[request])
        return self.slots[start : start + end - begin]
