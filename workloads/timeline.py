"""What ran on which instance when, from the Chrome trace a server gives at `/trace`."""

import re
from dataclasses import dataclass

import msgspec

MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class TimelineSlice:
    """One batch on one instance of its group; times in seconds."""

    instance_id: int
    start: float
    end: float
    group: tuple[int, ...]
    phase: str

    @property
    def dop(self) -> int:
        """The degree of parallelism: how many instances the group has."""
        return len(self.group)


@dataclass(frozen=True, slots=True)
class KVSample:
    """KV tokens an instance holds from `time` (seconds) until its next sample."""

    instance_id: int
    time: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slices and KV samples, each by time; times are in seconds on one clock."""

    slices: tuple[TimelineSlice, ...]
    kv_samples: tuple[KVSample, ...]

    @property
    def end(self) -> float:
        """When the last slice ends; 0 if there is none."""
        return max((s.end for s in self.slices), default=0.0)

    @property
    def instance_ids(self) -> list[int]:
        """Every instance that ran a batch or held KV."""
        return sorted({s.instance_id for s in self.slices} | {k.instance_id for k in self.kv_samples})

    def after(self, time: float) -> "Timeline":
        """Return what started after `time`, on a clock that is 0 at the first slice left."""
        slices = [s for s in self.slices if s.start > time]
        zero = min((s.start for s in slices), default=time)
        return Timeline(
            tuple(
                TimelineSlice(s.instance_id, s.start - zero, s.end - zero, s.group, s.phase) for s in slices
            ),
            tuple(
                KVSample(k.instance_id, k.time - zero, k.num_tokens)
                for k in self.kv_samples
                if k.time >= zero
            ),
        )

    def merged(self, gap: float) -> "Timeline":
        """Join neighbors on one instance of one group and phase that are at most `gap` seconds apart."""
        joined: list[TimelineSlice] = []
        last: dict[int, int] = {}  # instance to its last slice in `joined`
        for piece in self.slices:
            index = last.get(piece.instance_id)
            if index is not None:
                before = joined[index]
                is_same = (before.group, before.phase) == (piece.group, piece.phase)
                if is_same and piece.start - before.end <= gap:
                    end = max(before.end, piece.end)
                    joined[index] = TimelineSlice(
                        piece.instance_id, before.start, end, piece.group, piece.phase
                    )
                    continue
            last[piece.instance_id] = len(joined)
            joined.append(piece)
        return Timeline(tuple(joined), self.kv_samples)


class _WireArgs(msgspec.Struct):
    group: list[int] | None = None
    phase: str | None = None


class _WireEvent(msgspec.Struct):
    ph: str
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _WireTrace(msgspec.Struct):
    traceEvents: list[_WireEvent]  # noqa: N815  the format's own name


_INSTANCE = re.compile(r"instance (\d+)")


def parse_timeline(trace: bytes) -> Timeline:
    """Read batches (complete events whose arguments name a group) and the `KV tokens` counters.

    Other events are left out.

    Raises:
        msgspec.MsgspecError: the bytes are not a Chrome trace.
    """
    slices: list[TimelineSlice] = []
    samples: list[KVSample] = []
    for event in msgspec.json.decode(trace, type=_WireTrace).traceEvents:
        if event.ph == "X":
            slices += _slices(event)
        elif event.ph == "C" and event.name == "KV tokens":
            samples += _kv_samples(event)
    slices.sort(key=lambda s: (s.start, s.instance_id))
    samples.sort(key=lambda k: (k.time, k.instance_id))
    return Timeline(tuple(slices), tuple(samples))


def _slices(event: _WireEvent) -> list[TimelineSlice]:
    args = msgspec.json.decode(event.args, type=_WireArgs)
    if not args.group:
        return []
    start = event.ts * MICROSECOND
    end = start + event.dur * MICROSECOND
    return [TimelineSlice(int(event.tid), start, end, tuple(args.group), args.phase or event.name)]


def _kv_samples(event: _WireEvent) -> list[KVSample]:
    tokens_by_instance = msgspec.json.decode(event.args, type=dict[str, float])
    return [
        KVSample(int(match[1]), event.ts * MICROSECOND, round(tokens))
        for name, tokens in tokens_by_instance.items()
        if (match := _INSTANCE.fullmatch(name))
    ]
