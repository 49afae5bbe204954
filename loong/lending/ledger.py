"""The global debt ledger of DistKV-LLM: who lent what to whom, since when and why."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from loong.core.placement import InstanceId
from loong.core.request import RequestId


class LoanReason(StrEnum):
    """The reason of a loan."""

    FULL = "its own memory was full"
    THROUGHPUT = "the pair was predicted to make more tokens a second"
    UNKNOWN = "this manager knows no reason"


@dataclass(frozen=True, slots=True)
class Debt:
    """Blocks of a request that an instance keeps for the home of the request, since a time in seconds."""

    request_id: RequestId
    debtor_id: InstanceId
    creditor_id: InstanceId
    num_blocks: int
    since: float
    reason: LoanReason = LoanReason.UNKNOWN

    def __str__(self) -> str:
        return (
            f"instance {self.creditor_id} keeps {self.num_blocks} blocks of request {self.request_id} for "
            f"instance {self.debtor_id} since {self.since:g} s: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class DebtLedger:
    """All debts, by request and creditor."""

    debts: Mapping[tuple[RequestId, InstanceId], Debt] = field(default_factory=dict)

    def with_debt(self, debt: Debt) -> "DebtLedger":
        """Return it with this debt, or without if it is of 0 blocks. An earlier time and reason stay."""
        key = debt.request_id, debt.creditor_id
        if not debt.num_blocks and key not in self.debts:
            return self
        others = {k: d for k, d in self.debts.items() if k != key}
        if not debt.num_blocks:
            return DebtLedger(others)
        if (before := self.debts.get(key)) is not None and before.debtor_id == debt.debtor_id:
            debt = replace(before, num_blocks=debt.num_blocks)
        return DebtLedger({**others, key: debt})

    def without(self, instance_id: InstanceId) -> "DebtLedger":
        """Return it without the debts of an instance, and to it."""
        return DebtLedger(
            {k: d for k, d in self.debts.items() if instance_id not in (d.debtor_id, d.creditor_id)}
        )

    @property
    def blocks(self) -> Counter[tuple[InstanceId, InstanceId]]:
        """Return the blocks between each debtor and each creditor."""
        found: Counter[tuple[InstanceId, InstanceId]] = Counter()
        for debt in self.debts.values():
            found[debt.debtor_id, debt.creditor_id] += debt.num_blocks
        return found


def candidates(
    debtor_id: InstanceId,
    rooms: Mapping[InstanceId, int],
    communication_cost: Callable[[InstanceId], float],
) -> tuple[InstanceId, ...]:
    """Return the creditors that a debtor asks in turn: by least cost of communication, then by most room."""
    others = [instance_id for instance_id, num_free in rooms.items() if instance_id != debtor_id and num_free]
    return tuple(sorted(others, key=lambda i: (communication_cost(i), -rooms[i], i)))
