"""The history of a cluster as a Chrome trace, for Perfetto and chrome://tracing.

Each instance has a track with a slice for each group that it is in, and inside it a slice for each batch.
Counters show its KV. Migrations have tracks next to it, with an arrow from source to destination. A request
is a slice from its arrival to its end, with a mark at its first token. Losses, joins, drains and leaves are
marks on the track of their instance.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec

from loong.core.cluster_history import (
    BatchSlice,
    ClusterHistory,
    InstanceChange,
    KVLevel,
    KVMove,
    RequestSpan,
)
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId

ChromeEvent = dict[str, object]

GROUP_GAP = 0.01  # seconds between batches of one group that still belong to one slice
_PROCESS_ID = 1
_US = 1e6  # the format counts microseconds
_FIRST_LANE = 1_000_000  # ids of the tracks of KV moves start here
_MAX_LANES = 1_000


def chrome_trace(history: ClusterHistory) -> bytes:
    """Return the trace as JSON. Events are in the order of time, and slices come before the slices in them.

    It may take seconds, so it runs in a thread. It works event by event, and so does not hold the interpreter
    for long.
    """
    encode = msgspec.json.Encoder().encode
    reported: list[tuple[float, float, bytes]] = []
    track_ids: set[int] = set()
    for event in _events(history):
        if "tid" in event:
            track_ids.add(int(_number(event["tid"])))
        reported.append((_number(event["ts"]), -_number(event.get("dur", 0.0)), encode(event)))
    reported.sort(key=itemgetter(0, 1))
    instance_ids = sorted({*history.instance_ids, *(change.instance_id for change in history.changes)})
    written = [encode(track) for track in _tracks(instance_ids, track_ids)]  # at least one
    written += [event for *_, event in reported]
    capacity = {str(instance_id): tokens for instance_id, tokens in sorted(history.kv_capacity.items())}
    rest = encode({"displayTimeUnit": "ms", "otherData": {"kv_capacity": capacity}})
    written[0] = b'{"traceEvents":[' + written[0]
    written[-1] += b"]," + rest[1:]
    return b",".join(written)


def letters(instance_id: InstanceId) -> str:
    """Return A ...

    Z, AA, AB ... Perfetto colors slices by name without digits, so groups are named by letters.
    """
    text, rest = "", instance_id + 1
    while rest:
        rest, digit = divmod(rest - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def _events(history: ClusterHistory) -> Iterator[ChromeEvent]:
    yield from _request_events(history.requests)
    yield from _move_events(history.moves)
    yield from map(_change_event, history.changes)
    for level in history.kv_levels:
        yield _level_event(level, "kv_level")
    for instance_id in history.instance_ids:
        yield from _instance_events(instance_id, history.on(instance_id))


def _instance_events(instance_id: InstanceId, batches: Sequence[BatchSlice]) -> Iterator[ChromeEvent]:
    for stretch in _stretches(batches):
        first, last = stretch[0], stretch[-1]
        members = sorted(first.group.instance_ids)
        what = {"group": members, "dop": first.group.dop, "num_batches": len(stretch)}
        name = f"DoP {first.group.dop}: {'+'.join(map(letters, members))}"
        yield _slice(instance_id, "group", name, (first.started_at, last.ended_at), what)
        for batch in stretch:
            yield from _batch_events(instance_id, batch)


def _stretches(batches: Iterable[BatchSlice]) -> Iterator[Sequence[BatchSlice]]:
    """Yield the batches of one instance, split where its group changes.

    The order in the group does not matter.
    """
    stretch: list[BatchSlice] = []
    for batch in batches:
        is_same = stretch and _members(stretch[-1].group) == _members(batch.group)
        if stretch and not (is_same and batch.started_at - stretch[-1].ended_at <= GROUP_GAP):
            yield stretch
            stretch = []
        stretch.append(batch)
    if stretch:
        yield stretch


def _members(group: ESPGroup) -> frozenset[InstanceId]:
    return frozenset(group.instance_ids)


def _batch_events(instance_id: InstanceId, batch: BatchSlice) -> Iterator[ChromeEvent]:
    kv_reserved, kv_used = dict(batch.kv_reserved), dict(batch.kv_used)
    what: dict[str, object] = {
        "batch_id": batch.batch_id,
        "group": list(batch.group.instance_ids),
        "dop": batch.group.dop,
        "holders": list(batch.holder_ids),
        "phase": batch.phase,
        "num_prefill_tokens": batch.num_prefill_tokens,
        "longest_prompt": batch.longest_prompt,
        "num_recomputed_tokens": batch.num_recomputed_tokens,
        "request_ids": list(batch.request_ids),
    }
    for name, counts in (("kv_reserved", kv_reserved), ("kv_used", kv_used)):
        if instance_id in counts:
            what[name] = counts[instance_id]
    yield _slice(instance_id, "batch", batch.phase, (batch.started_at, batch.ended_at), what)
    for time, counts in ((batch.started_at, kv_reserved), (batch.ended_at, kv_used)):
        if instance_id in counts:
            yield _level_event(KVLevel(instance_id, time, counts[instance_id]), "of batch")


def _level_event(level: KVLevel, category: str) -> ChromeEvent:
    return {
        "ph": "C",
        "cat": category,
        "name": "KV tokens",
        "ts": level.time * _US,
        "pid": _PROCESS_ID,
        "tid": level.instance_id,
        "args": {f"instance {level.instance_id}": level.num_tokens},
    }


def _move_events(moves: Iterable[KVMove]) -> Iterator[ChromeEvent]:
    """Yield a slice at the source and at the destination of each move, and the arrow between them."""
    lanes: dict[InstanceId, list[float]] = {}  # to the end of the last move on each track
    for move in sorted(moves, key=lambda move: move.started_at):
        times = move.started_at, move.ended_at
        what: dict[str, object] = {
            "migration_id": move.migration_id,
            "request_id": move.request_id,
            "source_id": move.source_id,
            "destination_id": move.destination_id,
            "num_tokens": move.num_tokens,
            "is_committed": move.is_committed,
            "is_copy": move.is_copy,
        }
        outcome = "" if move.is_committed else ", rolled back"
        tokens = f"{move.num_tokens:,} KV tokens{' copied' if move.is_copy else ''}"
        out = _lane(move.source_id, times, lanes)
        to = _lane(move.destination_id, times, lanes)
        yield _slice(out, "kv_out", f"{tokens} to instance {move.destination_id}{outcome}", times, what)
        yield _slice(to, "kv_in", f"{tokens} from instance {move.source_id}{outcome}", times, what)
        arrow = {"cat": "kv", "name": "KV moves", "id": move.migration_id, "pid": _PROCESS_ID}
        middle = (move.started_at + move.ended_at) / 2
        yield {"ph": "s", "ts": move.started_at * _US, "tid": out, **arrow}
        yield {"ph": "f", "bp": "e", "ts": middle * _US, "tid": to, **arrow}


def _change_event(change: InstanceChange) -> ChromeEvent:
    return {
        "ph": "i",
        "s": "t",  # a mark on its own track
        "cat": "instance",
        "name": f"instance {change.instance_id} {change.kind}",
        "ts": change.time * _US,
        "pid": _PROCESS_ID,
        "tid": change.instance_id,
        "args": {"kind": change.kind, "reason": change.reason},
    }


def _request_events(spans: Iterable[RequestSpan]) -> Iterator[ChromeEvent]:
    for span in spans:
        event: ChromeEvent = {
            "cat": "request",
            "id": span.request_id,
            "name": f"prompt of {span.num_prompt_tokens:,} tokens",
            "pid": _PROCESS_ID,
        }
        what = {
            "num_prompt_tokens": span.num_prompt_tokens,
            "first_token_at": span.first_token_at,
            "ended_at": span.ended_at,
            "end": span.end,
        }
        yield {"ph": "b", "ts": span.arrived_at * _US, **event, "args": what}
        if span.first_token_at is not None:
            yield {"ph": "n", "ts": span.first_token_at * _US, **event, "name": "first token"}
        if span.ended_at is not None:
            yield {"ph": "e", "ts": span.ended_at * _US, **event}


def _lane(instance_id: InstanceId, times: tuple[float, float], lanes: dict[InstanceId, list[float]]) -> int:
    """Return the track of a move, so that the slices of one track do not overlap."""
    ends = lanes.setdefault(instance_id, [])
    start, end = times
    free = next((lane for lane, last_end in enumerate(ends) if last_end <= start), len(ends))
    ends[free : free + 1] = [end]
    return _FIRST_LANE + instance_id * _MAX_LANES + free


def _slice(
    track_id: int, category: str, name: str, times: tuple[float, float], args: Mapping[str, object]
) -> ChromeEvent:
    start, end = times
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start * _US,
        "dur": (end - start) * _US,
        "pid": _PROCESS_ID,
        "tid": track_id,
        "args": args,
    }


def _tracks(instance_ids: Iterable[InstanceId], track_ids: Iterable[int]) -> Iterator[ChromeEvent]:
    """Yield the names of all tracks. An instance's track comes before those of its KV moves."""
    names = {instance_id: f"instance {instance_id} ({letters(instance_id)})" for instance_id in instance_ids}
    for instance_id, lanes in groupby(
        (track_id - _FIRST_LANE for track_id in sorted(track_ids) if track_id >= _FIRST_LANE),
        key=lambda lane: lane // _MAX_LANES,
    ):
        names |= {_FIRST_LANE + lane: f"instance {instance_id}: KV that moves" for lane in lanes}
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS_ID, "args": {"name": "loong"}}
    for track_id, name in names.items():
        instance_id = track_id if track_id < _FIRST_LANE else (track_id - _FIRST_LANE) // _MAX_LANES
        order = 2 * instance_id + (track_id >= _FIRST_LANE)
        track = {"ph": "M", "pid": _PROCESS_ID, "tid": track_id}
        yield {**track, "name": "thread_name", "args": {"name": name}}
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": order}}


def _number(value: object) -> float:
    assert isinstance(value, int | float)  # the events above have only these types
    return value
