"""The configurations of all workers of a cluster, and the endpoints of their sockets."""

from loong.core.placement import InstanceId
from loong.executor.endpoints import Endpoints, WorkerId
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.network import ClusterNetwork
from loong.launcher.cluster.starter import ELSEWHERE, Host, WorkerStarter
from loong.worker.config import WorkerConfig


class WorkerSettings:
    """The settings of workers, by what their hosts are when they start.

    Workers on the head use Unix sockets to the engine, others TCP, and so do those of loans where there is a
    network. Each has `start_timeout` seconds to be ready.
    """

    def __init__(self, config: ClusterConfig, starter: WorkerStarter, network: ClusterNetwork | None) -> None:
        self._config, self._starter, self._network = config, starter, network
        self._reports = f"ipc://{starter.host(0).directory}/reports"
        self.start_timeout = config.start_timeout

    def endpoints(self) -> Endpoints:
        """Return the endpoints of the first workers."""
        config, network = self._config, self._network
        first_ids = (*range(config.num_instances), *range(config.most_instances, config.loan_ids.start))
        workers = [worker_id for i in first_ids for worker_id in self.workers_of(i)]
        return Endpoints(
            reports=self._reports,
            commands={worker_id: self.commands_endpoint(worker_id) for worker_id in workers},
            num_instances=config.world_size,
            remote_reports=None if network is None else network.remote_reports,
        )

    def host_id_of(self, instance_id: InstanceId) -> int:
        """Return the number of an instance's host, as plans know it."""
        return self._config.host_ids[instance_id]

    def workers_of(self, instance_id: InstanceId) -> list[WorkerId]:
        """Return the ranks of an instance."""
        return [(instance_id, rank) for rank in range(self._config.tp_size)]

    def commands_endpoint(self, worker_id: WorkerId, num_restarts: int = 0) -> str:
        """Return the endpoint of a worker's commands. Over TCP it has no port yet."""
        instance_id, tp_rank = worker_id
        host = self._host_of(instance_id)
        if not host.is_head:
            return f"tcp://{host.address}:*"
        suffix = f"-{num_restarts}" if num_restarts else ""
        return f"ipc://{host.directory}/worker-{instance_id}-{tp_rank}{suffix}"

    def forget(self, worker_id: WorkerId) -> None:
        """Let no other worker try to reach one that has ended."""
        if self._network is not None:
            instance_id, tp_rank = worker_id
            self._network.directory.forget(instance_id * self._config.tp_size + tp_rank)

    def worker(
        self, worker_id: WorkerId, commands: str, remote_reports: str, *, is_restarted: bool = False
    ) -> WorkerConfig:
        """Return the configuration of a worker that takes commands at an endpoint.

        It sends reports to `remote_reports` if it is not on the head.
        """
        config, network = self._config, self._network
        instance_id, tp_rank = worker_id
        host = self._host_of(instance_id)
        seen = None
        if network is not None and host.address is not None:
            seen = network.seen_from(host.address)
        return WorkerConfig(
            instance_id=instance_id,
            tp_rank=tp_rank,
            num_instances=config.world_size,
            tp_size=config.tp_size,
            host_ids=config.host_ids,
            model=config.model,
            load_format=config.load_format,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            seed=config.seed,
            kind=config.kind_of(instance_id),
            kv_capacity=config.kv_capacity_of(instance_id),
            most_kv_capacity=max(map(config.kv_capacity_of, range(config.world_size))),
            host_kv_capacity=config.host_kv_capacity,
            window_kv_capacity=0 if config.windows is None else config.windows.capacity,
            run_directory=str(host.directory),
            commands_endpoint=commands,
            reports_endpoint=self._reports if host.is_head else remote_reports,
            deadline=config.deadline,
            num_threads=1,
            heartbeat=config.heartbeat,
            device=config.device,
            fabric=config.fabric,
            attention_kernels=config.attention_kernels,
            max_served_leases=config.max_served_leases,
            attention_tiles=config.attention_tiles,
            graph_limits=config.graph_limits,
            least_saved=config.least_saved,
            tokenizer_folder=config.tokenizer_folder,
            log_format=config.log_format,
            log_source=config.log_source,
            is_late=is_restarted or config.most_instances > config.num_instances or config.max_loans > 0,
            lends=config.max_loans > 0,
            network=seen,
        )

    def _host_of(self, instance_id: InstanceId) -> Host:
        is_elsewhere = self._network is not None and instance_id in self._config.loan_ids
        return ELSEWHERE if is_elsewhere else self._starter.host(instance_id)
