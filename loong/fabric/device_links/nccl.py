"""Communicators of device links between GPUs, by NCCL."""

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from fcntl import ioctl
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

_FOREVER = timedelta(days=1)  # device links keep the deadline themselves, to raise errors
_TAG = 0
_ADVICE = (
    "NCCL_DEBUG=INFO shows more, NCCL_SOCKET_IFNAME names the network interface to use, and --fabric staged "
    "needs no NCCL"
)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it would end the process without an error
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would this, while an abort is slow
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class NcclCommunicator:
    """Implements Communicator for tensors on `device`."""

    def __init__(self, device: torch.device, store: Store, index: int) -> None:
        """Connect process `index` to the other one of two, and exchange a first message."""
        self._device, self._peer = device, 1 - index
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        kind = dist.ProcessGroup.BackendType.NCCL
        self._group = dist.ProcessGroup(store, index, 2)
        self._group._set_default_backend(kind)
        try:
            backend = dist.ProcessGroupNCCL(store, index, 2, options)
            self._group._register_backend(device, kind, backend)
            backend.eager_connect_single_device(device)
            self._exchange_first()
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {_ADVICE}") from error

    def _exchange_first(self) -> None:
        """Exchange a message, since NCCL makes connections for the first."""
        with torch.cuda.device(self._device):
            sent, come = torch.zeros(2, 1, device=self._device)
            for work in self.transfer(sent, come):
                work.wait()
            torch.cuda.current_stream(self._device).synchronize()

    def transfer(self, sent: Tensor | None, come: Tensor | None) -> Sequence[dist.Work]:
        """See Communicator."""
        self._group._start_coalescing(self._device)
        if sent is not None:
            self._group.send([sent], self._peer, _TAG)
        if come is not None:
            self._group.recv([come], self._peer, _TAG)
        return [self._group._end_coalescing(self._device)]

    def abort(self) -> None:
        """See Communicator."""
        self._group.abort()


def set_environment(address: str | None) -> None:
    """Set what NCCL and torch read, unless the user has set it.

    NCCL's own connections then use the network interface of `address`, this host's.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address is not None and (interface := _interface_of(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address, or None if no one has."""
    if ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
