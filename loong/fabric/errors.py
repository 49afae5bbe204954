"""What a data plane reports instead of waiting for ever.

ClusterError
├── PeerLostError          a peer's process is gone
├── AbandonedError         a peer left the batch or migration by an error of its own
└── DeadlineError          a peer is there, yet what it owes did not come in time
LoongError
└── InvalidMessageError    the caller broke a rule of the verbs: a bug  (also ValueError)
"""

from loong.core.errors import ClusterError, LoongError


class PeerLostError(ClusterError):
    """The process of (`instance_id`, `tp_rank`) is gone; nothing more will come from it."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int) -> None:
        super().__init__(f"{verb}: instance {instance_id} (tensor-parallel rank {tp_rank}) is lost")
        self.verb = verb
        self.instance_id = instance_id
        self.tp_rank = tp_rank


class AbandonedError(ClusterError):
    """(`instance_id`, `tp_rank`) left a batch or migration by its own error; it is there for the next."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int) -> None:
        super().__init__(f"{verb}: instance {instance_id} (tensor-parallel rank {tp_rank}) left by an error")
        self.verb = verb
        self.instance_id = instance_id
        self.tp_rank = tp_rank


class DeadlineError(ClusterError):
    """(`instance_id`, `tp_rank`) did not do its part of `verb` within `seconds`."""

    def __init__(self, verb: str, instance_id: int, tp_rank: int, seconds: float) -> None:
        super().__init__(
            f"{verb}: instance {instance_id} (tensor-parallel rank {tp_rank}) was silent for {seconds:g} s"
        )
        self.verb = verb
        self.instance_id = instance_id
        self.tp_rank = tp_rank
        self.seconds = seconds


class InvalidMessageError(LoongError, ValueError):
    """A tensor, a group or an order of calls that the verbs do not allow."""
