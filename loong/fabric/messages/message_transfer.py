"""The messages of one call of a verb, on their way between processes."""

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from loong.fabric.errors import InvalidMessageError
from loong.fabric.messages.link import Link, bytes_of
from loong.fabric.messages.mailbox import Address, MessageQueue


@dataclass(frozen=True, slots=True)
class MessageTransfer:
    """Outgoing messages, and expected messages with the tensors that they are copied into: a Pending."""

    mailbox: MessageQueue
    outgoing: tuple[Future[None], ...]
    incoming: tuple[tuple[Address, Tensor], ...]
    peers: Collection[Link]
    seconds: float

    def wait(self) -> None:
        """See Pending."""
        for sent in self.outgoing:
            sent.result()
        for address, tensor in self.incoming:
            message = self.mailbox.take(address, self.peers, self.seconds)
            destination = bytes_of(tensor)
            if len(message) != len(destination):
                raise InvalidMessageError(
                    f"{address.verb}: {len(message)} bytes came from rank {address.source}"
                    f" where {len(destination)} were expected"
                )
            destination.copy_(message)
