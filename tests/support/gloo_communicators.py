"""Communicators of device links for processors, by gloo: what NCCL's are between GPUs."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

_FOREVER = timedelta(days=1)
_AT_ONCE = timedelta(milliseconds=1)
_UNUSED_TAG = 1


class GlooCommunicator:
    """Implements Communicator for tensors of the host. `num_made` counts those of this process."""

    num_made: ClassVar[int] = 0

    def __init__(self, store: Store, index: int) -> None:
        """Connect process `index` to the other one of two."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        device, kind = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._group, self._peer = dist.ProcessGroup(store, index, 2), 1 - index
        self._group._set_default_backend(kind)
        self._group._register_backend(device, kind, dist.ProcessGroupGloo(store, index, 2, _FOREVER))
        self._sending: list[dist.Work] = []
        GlooCommunicator.num_made += 1

    def transfer(self, sent: Tensor | None, come: Tensor | None) -> Sequence[dist.Work]:
        """See Communicator. Nobody waits for what is sent, as no host waits for a GPU that sends."""
        if sent is not None:
            self._sending.append(self._group.send([sent.clone()], self._peer, 0))
        return [] if come is None else [self._group.recv([come], self._peer, 0)]

    def abort(self) -> None:
        """See Communicator. A wait that is too late ends the waits of all others."""
        with suppress(RuntimeError):
            nothing = torch.empty(1, device="cpu")
            self._group.recv([nothing], self._peer, _UNUSED_TAG).wait(_AT_ONCE)
