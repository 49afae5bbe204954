"""Mixes of devices that compute products and devices that only hold KV and attend, by price (Lamina, 4).

A unit is some computing devices that share the weights, and perhaps memory devices behind them. In each step
a batch of B requests gets one token each. Computing devices read all weights, compute, and add up their parts
in two sums a layer. Attention takes the holders of the KV as long as reading it. Prompts are computed where
the weights are: B tokens of answers of length o come with B / o prompts. Left out are imbalance and the time
of the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, hypot, inf

from loong.scheduler.cost.roofline import ModelShape

COMPUTING_COUNTS = (1, 2, 4, 8)
ROOM = 0.9  # of the memory of a device, for weights and KV
LARGEST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class OfferedDevice:
    """A device that can be had: its price in any unit, and its rates, in FLOP and bytes a second.

    One without FLOP only holds KV and attends. Devices of one unit that share weights reach each other by
    `peer_bandwidth` and `peer_latency`, all others by `link_bandwidth` and `latency`, in seconds a message.
    """

    name: str
    price: float
    memory_bytes: float
    memory_bandwidth: float
    linear_flops: float
    link_bandwidth: float
    latency: float
    peer_bandwidth: float
    peer_latency: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The mean lengths of requests in tokens, and the seconds that a token of an answer may take.

    Prompts may be computed on other devices than those of the unit.
    """

    num_prompt_tokens: float
    num_output_tokens: float
    tpot: float
    has_prompts: bool = True


@dataclass(frozen=True, slots=True)
class Mix:
    """A unit: computing devices, and perhaps memory devices. KV is on the latter alone if there are any.

    With two micro-batches one half of the batch is computed while the other half is attended (5.1.2).
    """

    computing: OfferedDevice
    num_computing: int
    memory: OfferedDevice | None = None
    num_memory: int = 0
    num_micro_batches: int = 1

    @property
    def price(self) -> float:
        """Return the price of the unit."""
        return self.num_computing * self.computing.price + (
            self.num_memory * self.memory.price if self.memory else 0.0
        )

    def __str__(self) -> str:
        """Return its devices."""
        if self.memory is None:
            return f"{self.num_computing} {self.computing.name}"
        halves = ", in halves" if self.num_micro_batches > 1 else ""
        return f"{self.num_computing} {self.computing.name} + {self.num_memory} {self.memory.name}{halves}"


@dataclass(frozen=True)
class Offer:
    """A mix at the largest batch that it has room and time for."""

    shape: ModelShape
    demand: Demand
    mix: Mix

    @cached_property
    def batch_size(self) -> int:
        """Return the requests of a batch; 0 if one has no room, or no time."""
        low, high = 0, min(self._room, LARGEST_BATCH)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_time(middle) <= self.demand.tpot else (low, middle - 1)
        return low

    @property
    def output_rate(self) -> float:
        """Return the tokens of answers a second."""
        return self.batch_size / self.step_time(self.batch_size) if self.batch_size else 0.0

    @property
    def rate_per_price(self) -> float:
        """Return the tokens of answers a second for one unit of price."""
        return self.output_rate / self.mix.price

    @property
    def needed_bandwidth(self) -> float:
        """Return the bytes a second at which links take as long as products."""
        return least_bandwidth(self.shape, self.batch_size, self.products_time(self.batch_size))

    def num_units(self, request_rate: float) -> int:
        """Return the units that serve `request_rate` requests a second."""
        return ceil(request_rate * self.demand.num_output_tokens / self.output_rate)

    def step_time(self, batch_size: int) -> float:
        """Return the seconds of a step, and of the share of prompts that comes with it.

        Prompts are computed between steps, so that nothing hides them.
        """
        num_parts = self.mix.num_micro_batches
        size = batch_size / num_parts
        computing = self.products_time(size)
        attending = self._attention_time(size) + self._travel_time(size)
        step = computing + attending if num_parts == 1 else num_parts * max(computing, attending)
        return step + self._prompts_time(batch_size)

    def products_time(self, batch_size: float) -> float:
        """Return the seconds of all but attention, for one token of each request."""
        num_parameters = self.shape.num_layer_parameters + self.shape.num_output_parameters
        reading = num_parameters * self.shape.element_bytes / self.mix.computing.memory_bandwidth
        computing = 2 * num_parameters * batch_size / self.mix.computing.linear_flops
        return hypot(reading, computing) / self.mix.num_computing + self._sums_time(batch_size)

    @property
    def prefill_time(self) -> float:
        """Return the seconds of a prompt of mean length on the computing devices of a unit."""
        shape, num_tokens = self.shape, self.demand.num_prompt_tokens
        pairs = num_tokens**2 / 2
        flops = 2 * shape.num_layer_parameters * num_tokens
        flops += 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
        computing = flops / self.mix.computing.linear_flops / self.mix.num_computing
        return computing + self._sums_time(num_tokens)

    @property
    def _room(self) -> int:
        """Return the requests of full length that have room."""
        mix, shape = self.mix, self.shape
        stored = shape.num_layer_parameters + 2 * shape.num_output_parameters + shape.num_idle_parameters
        left = mix.num_computing * ROOM * mix.computing.memory_bytes - stored * shape.element_bytes
        if left < 0:
            return 0
        if mix.memory is not None:
            left = mix.num_memory * ROOM * mix.memory.memory_bytes
        length = self.demand.num_prompt_tokens + self.demand.num_output_tokens
        return int(left / (length * shape.kv_bytes))

    def _sums_time(self, num_tokens: float) -> float:
        """Return the seconds of the sums over computing devices, two a layer, each part sent twice."""
        if (number := self.mix.num_computing) == 1:
            return 0.0
        device = self.mix.computing
        num_bytes = 2 * (number - 1) / number * num_tokens * self.shape.hidden_size * self.shape.element_bytes
        return 2 * self.shape.num_layers * (num_bytes / device.peer_bandwidth + 2 * device.peer_latency)

    def _prompts_time(self, batch_size: float) -> float:
        """Return the seconds of the prompts that come with a step, and of their KV on its way."""
        if not (demand := self.demand).has_prompts:
            return 0.0
        pushing = demand.num_prompt_tokens * self.shape.kv_bytes / self._link
        return (self.prefill_time + pushing) * batch_size / demand.num_output_tokens

    def _attention_time(self, batch_size: float) -> float:
        mix, demand = self.mix, self.demand
        holder, number = (mix.memory, mix.num_memory) if mix.memory else (mix.computing, mix.num_computing)
        length = demand.num_prompt_tokens + demand.num_output_tokens / 2
        return batch_size * self.shape.read_kv_bytes(length) / (number * holder.memory_bandwidth)

    def _travel_time(self, batch_size: float) -> float:
        mix = self.mix
        if mix.memory is None:
            return 0.0
        delay = 2 * self.shape.num_layers * max(mix.computing.latency, mix.memory.latency)
        return batch_size * traveling_bytes(self.shape) / self._link + delay

    @property
    def _link(self) -> float:
        """Return the bytes a second between computing and memory devices; infinite without the latter."""
        mix = self.mix
        if mix.memory is None:
            return inf
        return min(
            mix.num_computing * mix.computing.link_bandwidth, mix.num_memory * mix.memory.link_bandwidth
        )


def offers(
    shape: ModelShape, demand: Demand, devices: Sequence[OfferedDevice], most_memory: int
) -> list[Offer]:
    """Return all mixes of one or two kinds that have room and time, the cheapest token first."""
    found = [Offer(shape, demand, mix) for mix in _mixes(devices, most_memory)]
    return sorted(
        [offer for offer in found if offer.batch_size], key=lambda o: (-o.rate_per_price, o.mix.price)
    )


def traveling_bytes(shape: ModelShape) -> int:
    """Return the bytes of a token that go to its KV and come back in a step: q, k, v, and attention.

    With as many KV heads as heads this is Lamina's 4 e d L.
    """
    return shape.num_layers * (2 * shape.query_bytes + shape.kv_row_bytes)


def least_bandwidth(shape: ModelShape, batch_size: float, products_time: float) -> float:
    """Return the bytes a second at which what travels takes as long as products (Lamina, 4.2).

    Products take 2 N B / (MFU F) seconds, so that this is 2 e d L MFU F / N for models without GQA.
    """
    return batch_size * traveling_bytes(shape) / products_time


def _mixes(devices: Sequence[OfferedDevice], most_memory: int) -> Iterator[Mix]:
    for computing in [device for device in devices if device.linear_flops > 0]:
        for number in COMPUTING_COUNTS:
            yield Mix(computing, number)
            for memory in devices:
                for num_memory in range(1, most_memory + 1):
                    for num_micro_batches in (1, 2):
                        yield Mix(computing, number, memory, num_memory, num_micro_batches)
