"""The cost model: seconds from counts of work, with one coefficient a kind of work."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from math import hypot
from typing import Final

from loong.core.cost.cost_model import HostTimes, PrefillTerms
from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.cost.work import InstanceWork, Phase, StepWork
from loong.core.errors import ConfigError
from loong.core.placement import InstanceId
from loong.core.shared_kv import RELAY_QUERIES
from loong.scheduler.cost.network import ONE_HOST, Network

# What predictions can be computed with. A step has room for any number of tokens that take no time.
LEAST_TOKEN_SECONDS: Final = 1e-15
MOST_SECONDS: Final = 1e9
MOST_COUNT: Final = 1e15


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds of each kind of work (see `InstanceWork`), all layers of the model together.

    The defaults are round numbers for tests; `roofline` computes those of models and devices.
    """

    batch: float = 0.0  # each batch: to send it to its group, and to report it
    sent_request: float = 0.0  # each of its requests, to send it to the group
    idle_start: float = 0.0  # a batch before which instances of its group were idle
    step: float = 4e-3  # each step
    member: float = 1e-3  # each instance of the group but one
    settle: float = 0.0  # each instance of the group but one, where a lease agrees on going on
    exchange: float = 0.0  # a step in which queries travel
    ring: float = 0.0  # each hop of a step in which KV travels
    segment: float = 0.0  # each segment of its requests' KV, on every instance
    weights: float = 0.0  # reading the weights: a step with any token takes no less
    beside: float = 0.0  # a step with prompts and decodes
    beside_group: float = 0.0  # added if its group has several instances
    launch: float = 0.0  # a step with a prompt, if its kernels are started one by one
    mixed: float = 0.0  # added if there are decodes in the step
    exchange_launch: float = 0.0  # added to `launch` if queries travel
    ring_launch: float = 0.0  # added to `launch` if keys and values travel
    hop_launch: float = 0.0  # added for each of their hops
    beside_ring: float = 0.0  # added if some queries have no KV that travels
    token: float = 20e-6  # computing a token
    attend: float = 0.0  # an attention call a layer
    decode_key: float = 50e-9  # a key and value that single queries meet
    key: float = 0.0  # a key and value that longer blocks read, unless the step is captured
    pair: float = 10e-9  # a query that meets a key
    part_pair: float = 0.0  # added in groups and captured steps, for keys not computed with the queries
    ring_key: float = 1e-6  # a key and value that comes round the ring
    sent_query: float = 2e-6  # a query that goes to an instance and comes back
    kept_key: float = 0.0  # a key and value kept from the ring
    message: float = 1e-3  # each migration
    moved_key: float = 1e-6  # a key and value moved between instances
    offloaded_key: float = 1e-6  # a key and value moved to or from a host tier
    relay: float = 0.0  # a step that reads what several queries share in one pass
    relayed_key: float = 0.0  # a key that such a query meets without reading it


# Round numbers to try things with, as the defaults of `Coefficients` are.
DEFAULT_HOST = HostTimes(plan_request=20e-6, idle=0.02, lookahead_batch=4e-3, lookahead_request=130e-6)


@dataclass(frozen=True, slots=True)
class ServiceLane:
    """The way in which an instance attends for other groups' batches while it runs a batch of its own.

    Each layer waits for processors that the batch uses: `delay` seconds for all layers of a step. The batch
    loses `loss` seconds to each such step, besides those in which it reads and computes. If the instance
    reads for other groups for a share of the time, its answers take longer by `crowding` times that share.
    """

    delay: float = 0.0
    loss: float = 0.0
    crowding: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryReaders:
    """Memory instances, from `first_id` on, which run no batches.

    They attend with `coefficients` of their own kind of device; None: with those of the others.
    """

    first_id: InstanceId
    coefficients: Coefficients | None = None


@dataclass(frozen=True, slots=True)
class WindowReads:
    """The layers whose queries see the last `window` positions alone: their `share` of all layers."""

    share: float = 0.0
    window: int = 0

    def of(self, work: InstanceWork) -> InstanceWork:
        """Return work with the keys and pairs that layers meet on average.

        Counts are of layers without a window. As much of a history as possible is taken to be in the window,
        and queries to be as many as the instance computes.
        """
        if not self.share:
            return work
        seen, window = work.copy(), self.window
        num_decode_keys = work.num_decode_keys + work.num_relayed_keys  # windows are read for each query
        near = min(num_decode_keys, window * max(1, work.num_attends, work.num_tokens))
        seen.num_decode_keys = self._mean(work.num_decode_keys, near)
        seen.num_relayed_keys = self._mean(work.num_relayed_keys, 0)
        seen.num_relayed_prompt_keys = self._mean(work.num_relayed_prompt_keys, 0)
        num_blocks = max(work.num_blocks, work.num_prompt_blocks)
        seen.num_keys = self._mean(work.num_keys, min(work.num_keys, window * num_blocks + work.num_tokens))
        most_pairs = window * work.num_tokens
        seen.num_pairs = self._mean(work.num_pairs, min(work.num_pairs, most_pairs))
        seen.num_part_pairs = self._mean(work.num_part_pairs, min(work.num_part_pairs, most_pairs))
        return seen

    def _mean(self, whole: float, near: float) -> int:
        return int((1 - self.share) * whole + self.share * near)


NO_WINDOWS = WindowReads()


@dataclass(frozen=True, slots=True)
class WorkCostModel:
    """The time of a step is a fixed part of its group, plus the time of its busiest instance.

    An instance outside the group serves in its `lane` while it runs a batch of its own. Its attention
    overlaps that of members but not their products, which need the answers of all holders. The kernels of
    members are then started one by one.

    `overlap` is the part of attention that hides ring transfers, and the part of launches that overlaps with
    computing: 0 on CPUs, 1 with copy engines and streams. Steps within `graph_limits` launch no kernel one by
    one, and all their KV travels before it is attended. Instances from `first_host_tier_id` on are host
    tiers, and those of `memory` have no weights. `host` has the times of engine and workers, and `network`
    the hosts of instances. `windows` are those of the model's layers.
    """

    coefficients: Coefficients = Coefficients()
    overlap: float = 0.0
    graph_limits: CudaGraphLimits = NO_GRAPHS
    first_host_tier_id: InstanceId | None = None
    lane: ServiceLane = ServiceLane()
    host: HostTimes = DEFAULT_HOST
    network: Network = ONE_HOST
    memory: MemoryReaders | None = None
    windows: WindowReads = NO_WINDOWS

    @property
    def least_saved(self) -> int:
        """Return the keys whose reading takes as long as the fixed part of one pass over shared keys."""
        seconds = self.coefficients
        saved = seconds.decode_key - seconds.relayed_key
        if saved <= 0 or seconds.relay >= MOST_COUNT * saved:
            return int(MOST_COUNT)
        return 1 + int(seconds.relay / saved)

    def check(self) -> None:
        """Raise `ConfigError`, which names it, for a number that a file must not have."""
        for name, value, least, most in self._numbers():
            if not least <= value <= most:
                raise ConfigError(f"{name} must be {least:g} to {most:g}, but is {value:g}")

    def _numbers(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield the name, the value, and the least and the greatest possible value of each number."""
        for part in (self.coefficients, self.lane, self.host):
            for name, value in asdict(part).items():
                is_token = part is self.coefficients and name == "token"
                yield name, value, LEAST_TOKEN_SECONDS if is_token else 0.0, MOST_SECONDS
        for name, value in asdict(self.graph_limits).items():
            yield name, value, 0.0, MOST_COUNT
        yield "share", self.windows.share, 0.0, 1.0
        yield "window", self.windows.window, 0.0, MOST_COUNT
        yield "overlap", self.overlap, 0.0, 1.0
        yield "slowdown", self.network.slowdown, 1.0, MOST_SECONDS
        yield "delay", self.network.delay, 0.0, MOST_SECONDS
        yield "message", self.network.message, 0.0, MOST_SECONDS

    def scaled(self, factor: float) -> "WorkCostModel":
        """Return the model of an instance that takes `factor` times as long for everything."""
        coefficients = Coefficients(*(factor * seconds for seconds in astuple(self.coefficients)))
        return replace(self, coefficients=coefficients)

    def step_time(self, work: StepWork, /) -> float:
        """Return the seconds of one step of a batch."""
        seconds = self.coefficients
        has_mixed = seconds.beside > 0 or seconds.beside_group > 0
        is_mixed = has_mixed and not work.is_lease and work.phase is Phase.MIXED
        overhead = group_seconds(seconds, work, work.group.dop - 1, is_mixed)
        time = self.instance_time if self.replays(work) else self._launched_time
        if self.network.host_ids:
            overhead += self.network.seconds(work)
            work = self.network.slowed(work)
        if not work.holders:
            return overhead + max(map(time, work.instances.values()))
        served = max(self._held_time(work, instance_id) for instance_id in work.holders)
        if work.rotates:
            return overhead + max(served, self._rotating(time, work))
        if work.num_micro_batches > 1:
            return overhead + max(
                max(served, self._in_turn(time, part, work.num_micro_batches))
                for part in work.instances.values()
            )
        return overhead + max(
            time(part) + max(0.0, served - attention_seconds(seconds, self.windows.of(part)))
            for part in work.instances.values()
        )

    def _in_turn(self, time: Callable[[InstanceWork], float], work: InstanceWork, number: int) -> float:
        """Return the seconds of an instance's micro-batches, each of which reads the weights."""
        return number * time(work.share(number))

    def _rotating(self, time: Callable[[InstanceWork], float], work: StepWork) -> float:
        """Return the seconds of each member in which it computes 1 / DoP of the slices of all micro-batches.

        What travels between members is less than queries and partials, and travels meanwhile (Lamina, 5.1.1).
        """
        part = InstanceWork.together(work.instances.values()).share(work.num_micro_batches)
        return work.num_micro_batches / work.group.dop * time(part)

    def _held_time(self, work: StepWork, instance_id: InstanceId) -> float:
        """Return the seconds in which an instance outside the group answers its members."""
        memory = self.memory if self.memory is not None and instance_id >= self.memory.first_id else None
        of_kind = self.coefficients if memory is None else memory.coefficients or self.coefficients
        held = self.windows.of(work.holders[instance_id])
        seconds = instance_seconds(of_kind, held, self.overlap, is_captured=False)
        seconds *= 1 + self.lane.crowding * work.read_shares.get(instance_id, 0.0)
        is_apart = memory is not None or instance_id in work.idle_holder_ids
        return seconds if is_apart else seconds + self.lane.delay

    def served_time(self, work: InstanceWork, /) -> float:
        """Return the seconds that an instance's own batch loses to a step that it serves."""
        return attention_seconds(self.coefficients, self.windows.of(work)) + self.lane.loss

    def instance_time(self, work: InstanceWork, /) -> float:
        """Return the seconds of the part of a step that one instance computes by itself."""
        is_captured = self.has_captured(work)
        return instance_seconds(self.coefficients, self.windows.of(work), self.overlap, is_captured)

    def _launched_time(self, work: InstanceWork) -> float:
        """Return `instance_time` of a step that is not captured."""
        return instance_seconds(self.coefficients, self.windows.of(work), self.overlap, is_captured=False)

    def replays(self, work: StepWork) -> bool:
        """Return whether the members may replay a step: none with holders, nor on several hosts."""
        return not work.holders and not self.network.spans(work.instances)

    def has_captured(self, work: InstanceWork) -> bool:
        """Return whether an instance replays such a step from a captured graph."""
        return work.num_tokens > 0 and work.num_keys > 0 and self.graph_limits.has(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Return the terms of chunks and their history, striped over `dop` instances; queries travel.

        Launches are those of KV that travels, as in the last chunk, if they are more. Steps that can be
        captured are taken as captured, as longer steps hide most of their launches.
        """
        seconds, graph_limits = self.coefficients, self.graph_limits
        has_hosts = bool(self.network.host_ids) and dop > self.network.most_on_host
        if has_hosts:
            graph_limits = NO_GRAPHS
        launch = 0.0 if graph_limits.most_rows else seconds.launch
        if dop > 1:
            exchange_launch = 0.0 if graph_limits.most_rows else seconds.launch + seconds.exchange_launch
            ring_launch = seconds.launch + seconds.ring_launch + seconds.hop_launch * (dop - 1)
            launch = max(exchange_launch, 0.0 if graph_limits.most_kv_rows else ring_launch)
        overhead = seconds.batch + seconds.step + seconds.member * (dop - 1)
        sent_query = seconds.sent_query
        if has_hosts:
            overhead += self.network.delay
            sent_query *= self.network.query_factor(dop)
        per_pair = (seconds.pair + (seconds.part_pair if dop > 1 else 0.0)) / dop
        whole, in_window = 1 - self.windows.share, self.windows.share * self.windows.window * per_pair
        return PrefillTerms(
            overhead=overhead + (seconds.exchange if dop > 1 else 0.0),
            per_prompt=seconds.sent_request + seconds.attend * dop,
            floor=seconds.weights + (1 - self.overlap) * launch,
            launch=self.overlap * launch,
            per_token=(seconds.token + sent_query * (dop - 1) + seconds.key) / dop + in_window,
            per_cached_pair=whole * per_pair,
            per_new_pair=whole * (seconds.pair + seconds.part_pair * (dop - 1) / dop) / (2 * dop),
        )

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Return the seconds of one message, and of the KV of `num_tokens` tokens over the link."""
        seconds = self.coefficients
        first = self.first_host_tier_id
        is_host = first is not None and max(source_id, destination_id) >= first
        if is_host:
            return seconds.message + seconds.offloaded_key * num_tokens
        if self.network.spans((source_id, destination_id)):
            moved_key = seconds.moved_key * self.network.slowdown
            return seconds.message + self.network.message + moved_key * num_tokens
        return seconds.message + seconds.moved_key * num_tokens

    def copying_time(self, num_tokens: int, /) -> float:
        """Return the seconds in which an instance reads KV from its slots, or stores it there.

        It is read and written, as is what is kept of a ring.
        """
        return self.coefficients.kept_key * num_tokens


def group_seconds(seconds: Coefficients, work: StepWork, num_others: int, is_mixed: bool) -> float:
    """Return the seconds of a step in addition to its instances' work.

    `num_others` are all instances but one. `loong.scheduler.cost.prediction` compiles this function and the
    next two for tables with these fields.
    """
    binding = seconds.step + seconds.member * num_others
    if work.is_first:
        binding += seconds.batch + seconds.sent_request * work.num_requests
        if work.starts_idle:
            binding += seconds.idle_start
    if work.is_lease:
        binding += seconds.settle * num_others
    if work.has_exchange:
        binding += seconds.exchange
    if work.has_ring:
        binding += seconds.ring * num_others
    if is_mixed:
        binding += seconds.beside
        if num_others > 0:
            binding += seconds.beside_group
    return binding


def attention_seconds(seconds: Coefficients, work: InstanceWork) -> float:
    """Return the seconds of an instance's attention, by bandwidth and compute."""
    reading = seconds.decode_key * work.num_decode_keys
    if work.num_relayed_queries > 0:  # in one pass, unless reading them again is faster
        once = seconds.relay * (1 + work.num_relayed_queries / RELAY_QUERIES)
        once += seconds.relayed_key * work.num_relayed_keys
        again = seconds.decode_key * work.num_relayed_keys + seconds.key * work.num_relayed_prompt_keys
        reading += min(once, again)
    return reading + seconds.key * work.num_keys + seconds.pair * work.num_pairs


def instance_seconds(seconds: Coefficients, work: InstanceWork, overlap: float, is_captured: bool) -> float:
    """Return the seconds of an instance's part of a step, with the terms of `WorkCostModel`."""
    # An instance that computes no tokens attends for others.
    is_in_group = work.num_hops > 0 or work.num_sent_queries > 0 or work.num_tokens == 0
    attention = seconds.pair * work.num_pairs
    if not is_captured:
        attention += seconds.key * work.num_keys
    if is_captured or is_in_group:
        attention += seconds.part_pair * work.num_part_pairs
    reading = seconds.decode_key * work.num_decode_keys
    if work.num_relayed_queries > 0:  # in one pass, unless reading them again is faster
        once = seconds.relay * (1 + work.num_relayed_queries / RELAY_QUERIES)
        once += seconds.relayed_key * work.num_relayed_keys
        again = seconds.decode_key * work.num_relayed_keys
        if not is_captured:
            again += seconds.key * work.num_relayed_prompt_keys
        reading += min(once, again)
    computing = reading + attention
    if work.num_tokens > 0 and work.num_keys == 0:
        computing += hypot(seconds.weights, seconds.token * work.num_tokens)
    elif work.num_tokens > 0:
        launch = 0.0
        if not is_captured:  # the kernels of a step with a prompt are started one by one
            launch = seconds.launch + (seconds.mixed if work.num_decode_keys > 0 else 0.0)
            if work.num_sent_queries > 0:
                launch += seconds.exchange_launch
            if work.num_hops > 0:
                launch += seconds.ring_launch + seconds.hop_launch * work.num_hops
                if work.num_blocks > work.num_ring_blocks:
                    launch += seconds.beside_ring
        hidden = overlap * launch
        floor = seconds.weights + launch - hidden
        computing = max(hidden, computing + hypot(floor, seconds.token * work.num_tokens))
    hiding = 0.0 if is_captured else overlap * attention
    return (
        computing
        + seconds.segment * work.num_segments
        + seconds.attend * work.num_attends
        + max(0.0, seconds.ring_key * work.num_ring_keys - hiding)
        + seconds.sent_query * work.num_sent_queries
        + seconds.kept_key * work.num_kept_keys
    )
