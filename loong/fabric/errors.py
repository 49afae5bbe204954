"""Errors of the data plane, raised instead of waiting for ever.

ClusterError
└── PeerError              a peer did not do its part
    ├── PeerLostError      its process is gone
    ├── AbandonedError     it left the batch or migration by an error of its own
    └── DeadlineError      it is alive, but its message did not arrive in time
LoongError
└── InvalidMessageError    the caller broke a rule of the verbs: a bug  (also ValueError)
"""

from loong.core.errors import ClusterError, LoongError


class PeerError(ClusterError):
    """(`instance_id`, `tp_rank`) did not do its part of `verb`, because of `problem`."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int, problem: str) -> None:
        super().__init__(f"{verb}: instance {instance_id} (tensor-parallel rank {tp_rank}) {problem}")
        self.verb = verb
        self.instance_id = instance_id
        self.tp_rank = tp_rank


class PeerLostError(PeerError):
    """The process of (`instance_id`, `tp_rank`) is gone and sends nothing more."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int) -> None:
        super().__init__(verb, instance_id, tp_rank, "is lost")


class AbandonedError(PeerError):
    """(`instance_id`, `tp_rank`) left a batch or migration by an error of its own.

    It can join the next one.
    """

    def __init__(self, verb: str, instance_id: int, tp_rank: int) -> None:
        super().__init__(verb, instance_id, tp_rank, "left by an error")


class DeadlineError(PeerError):
    """(`instance_id`, `tp_rank`) did not do its part of `verb` within `seconds`."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int, seconds: float) -> None:
        super().__init__(verb, instance_id, tp_rank, f"was silent for {seconds:g} s")
        self.seconds = seconds


class InvalidMessageError(LoongError, ValueError):
    """The verbs do not allow this tensor, group or order of calls."""


class NoServiceError(InvalidMessageError):
    """A batch is to have holders outside its group, and the fabric has no service."""

    def __init__(self) -> None:
        super().__init__("this fabric has no service: batches have no holders outside their groups")
