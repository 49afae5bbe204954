"""The consequences of an event, as `ClusterState` returns them."""

from typing import NamedTuple

from loong.core.cluster_history import TokensOf
from loong.core.instructions import Instruction, RunBatch
from loong.core.snapshot import RunningBatch


class CommittedBatch(NamedTuple):
    """A batch from its commit to its end: its instruction, and what is known of its run.

    `running` has the plan with all steps by which a lease was extended. `kv_reserved` are the tokens in the
    pools of its group at its commit, with room for all that it may write.
    """

    instruction: RunBatch
    running: RunningBatch
    kv_reserved: TokensOf


class Applied(NamedTuple):
    """The consequences of an event: instructions, and whether a policy may act on it.

    The batch that `ended` with it is in flight no more, nor are the `voided` ones, which never end.
    """

    instructions: tuple[Instruction, ...] = ()
    needs_plan: bool = True
    ended: CommittedBatch | None = None
    voided: tuple[CommittedBatch, ...] = ()


PLANNED, UNPLANNED = Applied(), Applied(needs_plan=False)
"""The consequences of an event that ends nothing and needs no instruction."""
