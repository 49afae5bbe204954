"""The messages of KV events, as vLLM encodes them: msgpack arrays whose first member names the event."""

from typing import TypeAlias

import msgspec

DEVICE_MEDIUM = "GPU"  # vLLM's word for the pools of instances


class _Event(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The base of all events."""


class BlockStored(_Event, frozen=True):
    """Blocks that are cached now, one after the other; the parent is the block before the first.

    `extra_keys` has an entry for each block, or is None: the salt's digest for the first block of a prompt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks that are cached no more."""

    block_hashes: list[int]
    medium: str | None = DEVICE_MEDIUM


class AllBlocksCleared(_Event, frozen=True):
    """Nothing is cached now."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one moment; `ts` is its Unix time."""

    ts: float
    events: list[KVCacheEvent]
