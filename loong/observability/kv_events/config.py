"""The configuration of KV events, with the names and most defaults of vLLM."""

from typing import Annotated, Literal, TypeAlias

import msgspec

from loong.core.errors import ConfigError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sockets and bounds of a publisher. Only `publisher` zmq publishes anything.

    The last `buffer_steps` batches are kept for `replay_endpoint`. A block has `block_size` tokens.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""
    block_size: Count = 16

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parsed_kv_events(text: str) -> KVEventsConfig:
    """Return the configuration that a JSON object says. Raises `ConfigError` if it says none."""
    try:
        return msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--kv-events-config {text!r}: {error}") from None
