"""The cost model: seconds from counts of work, with one coefficient a kind of work."""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from math import hypot
from typing import Final

from loong.core.cost.cost_model import HostTimes, PrefillTerms
from loong.core.cost.cuda_graph_limits import NO_GRAPHS, CudaGraphLimits
from loong.core.cost.work import InstanceWork, Phase, StepWork
from loong.core.errors import ConfigError
from loong.core.placement import InstanceId
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
class WorkCostModel:
    """The time of a step is a fixed part of its group, plus the time of its busiest instance.

    An instance outside the group serves in its `lane` while it runs a batch of its own. Its attention
    overlaps that of members but not their products, which need the answers of all holders. The kernels of
    members are then started one by one.

    `overlap` is the part of attention that hides ring transfers, and the part of launches that overlaps with
    computing: 0 on CPUs, 1 with copy engines and streams. Steps within `graph_limits` launch no kernel one by
    one, and all their KV travels before it is attended. Instances from `first_host_tier_id` on are host
    tiers. `host` has the times of engine and workers, and `network` the hosts of instances.
    """

    coefficients: Coefficients = Coefficients()
    overlap: float = 0.0
    graph_limits: CudaGraphLimits = NO_GRAPHS
    first_host_tier_id: InstanceId | None = None
    lane: ServiceLane = ServiceLane()
    host: HostTimes = DEFAULT_HOST
    network: Network = ONE_HOST

    @property
    def least_saved(self) -> int:
        """Return the keys of single queries that one pass must save to be faster than reading them again."""
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
        return overhead + max(
            time(part) + max(0.0, served - attention_seconds(seconds, part))
            for part in work.instances.values()
        )

    def _held_time(self, work: StepWork, instance_id: InstanceId) -> float:
        """Return the seconds in which an instance outside the group answers its members."""
        seconds = self._launched_time(work.holders[instance_id])
        seconds *= 1 + self.lane.crowding * work.read_shares.get(instance_id, 0.0)
        return seconds if instance_id in work.idle_holder_ids else seconds + self.lane.delay

    def served_time(self, work: InstanceWork, /) -> float:
        """Return the seconds that an instance's own batch loses to a step that it serves."""
        return attention_seconds(self.coefficients, work) + self.lane.loss

    def instance_time(self, work: InstanceWork, /) -> float:
        """Return the seconds of the part of a step that one instance computes by itself."""
        return instance_seconds(self.coefficients, work, self.overlap, self.has_captured(work))

    def _launched_time(self, work: InstanceWork) -> float:
        """Return `instance_time` of a step that is not captured."""
        return instance_seconds(self.coefficients, work, self.overlap, is_captured=False)

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
        return PrefillTerms(
            overhead=overhead + (seconds.exchange if dop > 1 else 0.0),
            per_prompt=seconds.sent_request + seconds.attend * dop,
            floor=seconds.weights + (1 - self.overlap) * launch,
            launch=self.overlap * launch,
            per_token=(seconds.token + sent_query * (dop - 1) + seconds.key) / dop,
            per_cached_pair=(seconds.pair + (seconds.part_pair if dop > 1 else 0.0)) / dop,
            per_new_pair=(seconds.pair + seconds.part_pair * (dop - 1) / dop) / (2 * dop),
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
    if work.num_relayed_keys > 0:  # in one pass, unless reading them again is faster
        once = seconds.relay + seconds.relayed_key * work.num_relayed_keys
        reading += min(once, seconds.decode_key * work.num_relayed_keys)
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
    if work.num_relayed_keys > 0:  # in one pass, unless reading them again is faster
        once = seconds.relay + seconds.relayed_key * work.num_relayed_keys
        reading += min(once, seconds.decode_key * work.num_relayed_keys)
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
