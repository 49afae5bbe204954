"""Addresses of workers, and the workers that an instruction is for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from loong.core.instance import home_instance_id
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    ShareKV,
    StopLease,
)
from loong.core.placement import InstanceId

WorkerId: TypeAlias = tuple[InstanceId, int]  # instance and tp rank


@dataclass(frozen=True, slots=True)
class RemoteReports:
    """An endpoint `tcp://ADDRESS:*` for reports of workers on other hosts, which know `secret`."""

    endpoint: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of workers' commands and reports. `num_instances` does not count host tiers.

    Commands to workers on other hosts have a port only once their workers are ready.
    """

    reports: str
    commands: Mapping[WorkerId, str]
    num_instances: int
    remote_reports: RemoteReports | None = None

    def members(self, instruction: RunBatch) -> tuple[WorkerId, ...]:
        """Return the workers that run a batch and report its end; those of holders serve it only."""
        group = instruction.plan.group
        return tuple(worker for i in group.instance_ids for worker in self.workers_of(i))

    def workers_of(self, instance_id: InstanceId) -> tuple[WorkerId, ...]:
        """Return the ranks of an instance, or of the instance that keeps a host tier."""
        home_id = home_instance_id(instance_id, self.num_instances)
        return tuple(worker_id for worker_id in self.commands if worker_id[0] == home_id)

    def addressees(self, instruction: Instruction) -> tuple[WorkerId, ...]:
        """Return the workers that take part in an instruction."""
        match instruction:
            case RunBatch():
                instance_ids = instruction.participant_ids
            case ExtendLease():
                instance_ids = instruction.group.instance_ids
            case StopLease():
                return ((instruction.group.leader_id, 0),)
            case MoveKV():
                migration = instruction.migration
                instance_ids = (migration.segment.instance_id, migration.destination_id)
            case ReleaseKV() | ReleaseWindows() | ShareKV():
                instance_ids = instruction.instance_ids
            case LendSlots():
                instance_ids = (instruction.instance_id,)
            case _:
                assert_never(instruction)
        workers = (worker for i in instance_ids for worker in self.workers_of(i))
        return tuple(dict.fromkeys(workers))
