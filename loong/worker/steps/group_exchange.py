"""The exchanges of a group's captured step: in each layer, queries and partials travel, or KV does."""

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from loong.core.placement import InstanceId
from loong.fabric.lanes import Lane
from loong.kernels import Partial


class GroupExchange(Protocol):
    """The exchanges of one instance. T is the same on all members of a group, N the world's instances."""

    @property
    def num_instances(self) -> int:
        """Return N."""

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """Set the members of the group in the next steps, in the open batch, and the tokens of each.

        They have T tokens at most. `holder_ids` are instances that serve the batch, which have none.
        """

    def gather(self, layer: int, q: Tensor) -> Tensor:
        """Return the queries [N * T, H, D] of all masters, from q [T, H, D] on each.

        Row i * T + t is token t of instance i; rows without a token may hold anything.
        """

    def own(self, part: Partial) -> Partial:
        """Return the rows of this instance's tokens in `part`, which has those of all masters."""

    def merge(self, layer: int, part: Partial) -> Tensor:
        """Return attention [T, H, D] of this instance's tokens, merged from all members' parts."""


class KVExchange(GroupExchange, Protocol):
    """An exchange that can also send KV to all members.

    In such a step the tokens are those whose KV a member sends, at least one, and no queries are gathered.
    """

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:
        """Return the KV [N * T, ...] of all members, from rows `block` [T, ...] on each.

        Rows are as in `gather`. They are valid until the second next layer's is gathered.
        """

    @property
    def max_kv_room(self) -> int:
        """Return the largest T of `gather_kv`."""

    def services(self) -> Mapping[Lane, GroupExchange]:
        """Return the exchanges of steps of other groups that this instance serves, each for one at a time.

        Their `begin` names the members of that group. Queries of this instance are ignored. Groups that are
        served at once have no common member.
        """


class NoExchange:
    """The exchange of an instance that is a group by itself. See GroupExchange."""

    num_instances = 1

    def begin(self, num_tokens: Mapping[InstanceId, int], holder_ids: Collection[InstanceId] = ()) -> None:
        """See GroupExchange."""

    def gather(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return q

    def own(self, part: Partial) -> Partial:
        """See GroupExchange."""
        return part

    def merge(self, layer: int, part: Partial) -> Tensor:  # noqa: ARG002 - see GroupExchange
        """See GroupExchange."""
        return part.out
