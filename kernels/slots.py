"""The slots of a KV pool that a batch of requests attends."""

from typing import NamedTuple

import torch
from torch import Tensor


class SlotLists(NamedTuple):
    """The slots of B requests in device memory, so that a captured graph follows their changes.

    Request b has `cu_seqlens[b + 1] - cu_seqlens[b]` slots: `slots[starts[b]]` and those after it. Lists may
    have gaps between them, so that each can grow in place. A request without KV here has an empty list.
    """

    slots: Tensor  # [N] int64, in any order
    starts: Tensor  # [B] int64
    cu_seqlens: Tensor  # [B + 1] int32, from 0

    @classmethod
    def of(cls, lists: list[Tensor]) -> "SlotLists":
        """Return lists [n] int64, at least one, laid out one after the other."""
        ends = torch.tensor([0, *map(len, lists)]).cumsum(0)
        slots = torch.cat(lists)
        return cls(slots, ends[:-1].to(slots.device), ends.to(slots.device, torch.int32))

    def list_of(self, request: int) -> Tensor:
        """Return the slots [n] of one request. Reads device memory."""
        begin, end = self.cu_seqlens[request : request + 2].tolist()
        start = int(self.starts[request])
        return self.slots[start : start + end - begin]
