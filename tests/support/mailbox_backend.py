"""A processor whose captured steps exchange by the kernels of GPUs, interpreted."""

import concurrent_kernels  # noqa: F401 - what serves runs beside other steps
from capturing_backend import CapturingBackend
from machines import H200_GRAPH_LIMITS

from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.placement import InstanceId
from loong.fabric.protocol import Fabric
from loong.model.tensor_parallel import Shard
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.mailbox_exchange import MailboxExchange


class MailboxBackend(CapturingBackend):
    """Needs a fabric over arenas."""

    def __init__(self, graph_limits: CudaGraphLimits = H200_GRAPH_LIMITS) -> None:
        super().__init__(graph_limits)

    def group_exchange(self, fabric: Fabric, instance_id: InstanceId, shard: Shard) -> KVExchange | None:
        """See Backend."""
        assert fabric.arena is not None
        return MailboxExchange(fabric.arena, shard, self.device)
