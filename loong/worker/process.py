"""The worker process: takes commands, runs batches and migrations in a thread each, and serves in more.

Batches run in the order of submission, and so do migrations. All workers receive them in the engine's order,
so no two wait for each other in a circle. An error in either thread is reported, and ends the process: the
engine then decides about its work.
"""

import gc
import logging
import os
import sys
import threading
from concurrent.futures import Future
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import assert_never

import torch
import zmq

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ClusterError, ConfigError, LoongError
from loong.core.instance import InstanceKind
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
from loong.fabric.errors import PeerError
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.grammar.mask_process import SharedMasks, fork_mask_process
from loong.messages.secure_sockets import ConnectionWatch, connect_securely, listen_securely
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import (
    MAX_FRAME_BYTES,
    CommandDone,
    EndTrace,
    ForgetFailures,
    Heartbeat,
    MigrationDone,
    PrepareGrammar,
    Report,
    Shutdown,
    SlotsLent,
    StartTrace,
    WireError,
    WorkerFailed,
    WorkerReady,
    address,
    decode_command,
    encode,
)
from loong.model.config import ModelConfig
from loong.model.quantization.fp8 import multiplies_fp8
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard
from loong.model.tiles import TileSizes
from loong.processes.child import config_of, end_with_parent, leave_signals_to_parent, name_process
from loong.processes.logs import log_to_stderr
from loong.processes.stacks import stacks_on_request
from loong.worker.backend import Backend, CpuBackend
from loong.worker.batch_loop import BatchLoop
from loong.worker.batches.lease_ends import LeaseEnds
from loong.worker.config import WorkerConfig
from loong.worker.kv_part import KVPart
from loong.worker.parts import part_of
from loong.worker.sampling.mask_processes import MaskProcesses
from loong.worker.tracer import Tracer

logger = logging.getLogger(__name__)


class Reports:
    """The reports to the engine. Sockets belong to one thread each, so every thread makes its own."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", config: WorkerConfig) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 1000)
        endpoint = config.reports_endpoint
        if config.network is not None and endpoint.startswith("tcp:"):
            connect_securely(self._socket, endpoint, config.network.secret)
        else:
            self._socket.connect(address(endpoint))

    def send(self, *reports: Report) -> None:
        """Queue reports, which leave in order and reach the engine together."""
        self._socket.send_multipart([encode(report) for report in reports])

    def close(self) -> None:
        """Send queued reports, for at most a second."""
        self._socket.close()


class Worker:
    """One rank of one instance."""

    def __init__(
        self,
        config: WorkerConfig,
        sockets: SocketFabric,
        context: "zmq.Context[zmq.Socket[bytes]]",
        masks: MaskProcesses | None = None,
    ) -> None:
        """`masks` are the result of `start_masks`."""
        self._config, self._sockets, self._context = config, sockets, context
        name = f"the commands' socket of rank {config.tp_rank} of instance {config.instance_id}"
        self._strays = StrayFrames(name)
        self._backend = _make_backend(config)
        self._device = self._backend.device
        self._device.use()
        shard = Shard(_model_config(config), config.tp_rank, config.tp_size)
        self._fabric = self._backend.connect(sockets, shard)
        self._part = part_of(config, shard, self._fabric, self._backend, masks)
        self._kv = KVPart(config, shard, self._fabric, self._backend)
        self._batches: SimpleQueue[RunBatch | ForgetFailures | None] = SimpleQueue()  # None: check for traces
        self._tracing: SimpleQueue[StartTrace | EndTrace] = SimpleQueue()
        self._migrations: SimpleQueue[MoveKV] = SimpleQueue()
        self._lease_ends = LeaseEnds(config.deadline)
        self._commands_endpoint = ""  # over TCP, once it has a port
        self._preparing = threading.Lock()  # lets one thread at a time use the next
        self._prepared = self._reports()  # of grammars that were compiled
        self._control = self._reports()  # of the thread that takes commands

    def serve(self) -> None:
        """Take commands until the shutdown command, once all workers are there.

        A late worker waits only for the ranks of its own instance.
        """
        if self._config.is_late:
            self._sockets.wait_for_instance()
        else:
            self._fabric.wait_for_peers()
        commands = self._listen()
        for loop in (self._run_batches, self._run_migrations):
            threading.Thread(target=loop, daemon=True).start()
        beat_at = monotonic()
        while True:
            if monotonic() >= beat_at:
                num_strays = self._strays.num_dropped + self._sockets.num_stray_frames
                self._control.send(Heartbeat(self._config.instance_id, self._config.tp_rank, num_strays))
                beat_at = monotonic() + self._config.heartbeat
            if not commands.poll(max(1, round((beat_at - monotonic()) * 1000))):
                continue
            try:
                command = decode_command(commands.recv())
            except WireError as error:
                self._strays.drop("a frame that is no command", str(error))
                continue
            if isinstance(command, Shutdown):
                return
            self._take(command)

    def _listen(self) -> "zmq.Socket[bytes]":
        """Return the socket for commands, which may have a port from now on."""
        commands = self._context.socket(zmq.PULL)
        commands.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        endpoint, network = self._config.commands_endpoint, self._config.network
        if network is not None and endpoint.startswith("tcp:"):
            error = ClusterError("the connection to the engine broke")
            ConnectionWatch(commands, self._strays, lambda: _fail(self._config, error))
            self._commands_endpoint = listen_securely(commands, endpoint, network.secret)
        else:
            commands.bind(address(endpoint))
        return commands

    def _take(self, command: Instruction | PrepareGrammar | StartTrace | EndTrace | ForgetFailures) -> None:
        match command:
            case ForgetFailures():
                self._batches.put(command)
            case RunBatch():
                if self._config.instance_id in command.plan.group.instance_ids:
                    self._batches.put(command)
                else:
                    self._kv.begin_serving(command)
            case StartTrace() | EndTrace():
                self._tracing.put(command)
                self._batches.put(None)
            case ExtendLease():
                self._lease_ends.extend(command.batch_id, command.num_steps)
            case StopLease():
                self._lease_ends.stop(command.batch_id, command.step)
            case MoveKV():
                self._migrations.put(command)
            case ReleaseKV():
                self._release(command)
            case ReleaseWindows():
                self._kv.release_windows(command)
            case ShareKV():
                self._kv.share(command)
            case LendSlots():
                self._lend(command)
            case PrepareGrammar():
                self._prepare(command)
            case _:
                assert_never(command)

    def _prepare(self, command: PrepareGrammar) -> None:
        def on_prepared(prepared: "Future[int]") -> None:
            failure = "" if (error := prepared.exception()) is None else f"{type(error).__name__}: {error}"
            config = self._config
            with self._preparing:
                self._prepared.send(CommandDone(command.number, config.instance_id, config.tp_rank, failure))

        self._part.prepare(command.grammar).add_done_callback(on_prepared)

    def _lend(self, command: LendSlots) -> None:
        config, slots = self._config, self._kv.pool.lend(command.loan_id, command.num_tokens)
        self._control.send(SlotsLent(command.loan_id, config.instance_id, config.tp_rank, slots))

    def _release(self, command: ReleaseKV) -> None:
        if command.positions is None or command.is_void:  # what is known here may go on elsewhere, or end
            self._part.forget(command.owner_id)
            self._kv.wait_for(command.owner_id)
        self._kv.release(command)

    def _run_batches(self) -> None:
        reports = self._reports()
        self._device.use()
        self._kv.warm_up(self._part.warm_up(self._kv.pool))
        gc.freeze()  # what is there stays: a collection that walked all of it would hold up a step
        config = self._config
        reports.send(
            WorkerReady(config.instance_id, config.tp_rank, self._commands_endpoint, self._backend.serves)
        )
        tracer = Tracer([*self._part.spans(), *self._kv.spans()])
        trace = partial(self._trace, tracer, reports)
        if (runner := self._part.runner) is None:
            while True:  # what others need is served in threads of its own
                self._batches.get()
                trace()
        loop = BatchLoop(config.instance_id, config.tp_rank, runner, self._lease_ends, reports.send, trace)
        while True:
            loop.turn(self._batches)

    def _trace(self, tracer: Tracer, reports: Reports) -> None:
        """Begin and end traces by the commands that have arrived."""
        while not self._tracing.empty():
            failure, command = "", self._tracing.get()
            try:
                match command:
                    case StartTrace():
                        tracer.start()
                    case EndTrace():
                        tracer.end(None if command.path is None else Path(command.path))
                    case _:
                        assert_never(command)
            except (OSError, RuntimeError) as error:  # of the disk or the profiler; batches can do without
                failure = f"{type(error).__name__}: {error}"
            config = self._config
            reports.send(CommandDone(command.number, config.instance_id, config.tp_rank, failure))

    def _run_migrations(self) -> None:
        reports = self._reports()
        self._device.use()
        instance_id, tp_rank = self._config.instance_id, self._config.tp_rank
        while True:
            command = self._migrations.get()
            is_committed = self._kv.move(command)
            reports.send(MigrationDone(command.migration_id, instance_id, tp_rank, is_committed))

    def _reports(self) -> Reports:
        return Reports(self._context, self._config)


def _model_config(config: WorkerConfig) -> ModelConfig:
    return find_config(
        config.model, config.load_format, config.dtype, config.quantization, config.kv_cache_dtype
    )


def _make_backend(config: WorkerConfig) -> Backend:
    if config.device == "cpu":
        return CpuBackend(config.least_saved)
    from loong.worker.cuda_backend import CudaBackend  # not at the top: its kernels need Triton

    model = _model_config(config)
    dtype = model.torch_dtype
    index = config.world.index_on_host(config.rank) % torch.cuda.device_count()
    tiles = None if config.attention_tiles is None else TileSizes(*config.attention_tiles)
    kernels = AttentionKernels(config.attention_kernels)
    if model.has_fp8_kv:
        kernels = AttentionKernels.TRITON
        if not multiplies_fp8(torch.device("cuda", index)):
            raise ConfigError("--kv-cache-dtype fp8 needs a GPU from Ada or Hopper on")
    backend = CudaBackend(
        index, dtype, config.fabric, tiles, config.graph_limits, kernels, config.least_saved
    )
    backend.max_served_leases = config.max_served_leases
    return backend


def main() -> None:
    """Run the worker whose config is the first line of standard input; end when the input is closed."""
    leave_signals_to_parent()
    stdin = FileIO(sys.stdin.fileno(), closefd=False)  # a buffer has a lock, which a reading thread holds
    config = config_of(stdin.readline(), WorkerConfig)
    name_process(f"loong-worker-{config.instance_id}"[:15])
    log_to_stderr(config.log_format, config.log_source)
    threading.excepthook = lambda args: _fail(config, args.exc_value)
    sys.excepthook = lambda _kind, error, _trace: _fail(config, error)
    masks = start_masks(config)  # before there are threads
    end_with_parent(stdin)
    torch.set_num_threads(config.num_threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = Path(config.run_directory)
    fabric = SocketFabric(folder, config.world, config.rank, deadline=config.deadline, network=config.network)
    with stacks_on_request(f"the worker of instance {config.instance_id}, rank {config.tp_rank}"):
        Worker(config, fabric, context, masks).serve()
        os._exit(0)  # threads may be in the middle of their work, which no one needs


def start_masks(config: WorkerConfig) -> MaskProcesses | None:
    """Start the processes that find the tokens of grammars, on the first rank of an instance with weights.

    They end with this process.
    """
    if config.tokenizer_folder is None or config.tp_rank > 0 or config.kind is not InstanceKind.FULL:
        return None
    vocab_size = _model_config(config).vocab_size
    shared = SharedMasks(vocab_size)
    return MaskProcesses(fork_mask_process(Path(config.tokenizer_folder), vocab_size, shared), shared)


def _fail(config: WorkerConfig, error: BaseException | None) -> None:
    """Report an error that this process cannot handle, and end at once: other threads may hang in it."""
    if error is not None and not isinstance(error, LoongError):
        logger.error("instance %d, rank %d cannot go on", config.instance_id, config.tp_rank, exc_info=error)
    message = str(error) if isinstance(error, LoongError) else f"{type(error).__name__}: {error}"
    blamed = (error.instance_id, error.tp_rank) if isinstance(error, PeerError) else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # a separate one: other threads use theirs
    reports = Reports(context, config)
    reports.send(WorkerFailed(config.instance_id, config.tp_rank, message, blamed))
    reports.close()
    context.term()  # returns once the report has left
    os._exit(1)
