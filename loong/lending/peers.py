"""The processes that a manager knows, by address and epoch, and the envelopes between them."""

from collections.abc import Iterable, Mapping

from loong.lending.messages import Address, Body, Envelope, Member


class Peers:
    """The epochs of all other processes, and of this one, which answers for its `own` addresses.

    A supervisor says who is lost and who has joined, in their order, but perhaps late. Messages from or for
    any other epoch than the known one are not accepted.
    """

    def __init__(self, own: Iterable[Address], epoch: int, epochs: Mapping[Address, int]) -> None:
        self.own = tuple(own)
        self.epoch = epoch
        self.epochs = {**epochs, **dict.fromkeys(self.own, epoch)}
        self._number = 0

    def joined(self, address: Address, epoch: int) -> None:
        """Know a new process."""
        self.epochs[address] = epoch

    def lost(self, address: Address) -> None:
        """Forget a process."""
        self.epochs.pop(address, None)

    def update(self, members: Iterable[Member]) -> tuple[list[Address], list[Member]]:
        """Know exactly these other processes. Return who is lost, and who has joined since."""
        there = {member.address: member for member in members if member.address not in self.own}
        lost = [a for a in self.epochs if a not in self.own and not _is_same(there.get(a), self.epochs[a])]
        new = [m for a, m in there.items() if not _is_same(m, self.epochs.get(a))]
        for address in lost:
            self.lost(address)
        for member in new:
            self.joined(member.address, member.epoch)
        return lost, new

    def accepts(self, envelope: Envelope) -> bool:
        """Return whether a message is for this process, and from one that is there."""
        is_mine = envelope.receiver in self.own and envelope.receiver_epoch == self.epoch
        return is_mine and self.epochs.get(envelope.sender) == envelope.sender_epoch

    def new_number(self) -> int:
        """Return a number for a question."""
        self._number += 1
        return self._number

    def message(self, sender: Address, receiver: Address, number: int, body: Body) -> list[Envelope]:
        """Return a message; none if its receiver is not there."""
        if (epoch := self.epochs.get(receiver)) is None:
            return []
        return [Envelope(sender, receiver, self.epoch, epoch, number, body)]

    def answer(self, envelope: Envelope, body: Body) -> list[Envelope]:
        """Return the answer to a question."""
        return self.message(envelope.receiver, envelope.sender, envelope.number, body)


def _is_same(member: Member | None, epoch: int | None) -> bool:
    return member is not None and member.epoch == epoch
