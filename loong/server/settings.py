"""Settings of the HTTP server."""

import re
from dataclasses import dataclass, field

from loong.core.errors import ConfigError

ANY_ORIGIN = "*"
AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]+)?")  # a host and perhaps a port
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{AUTHORITY.pattern}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Bounds and names of the server. Intervals and timeouts are in seconds.

    A request waits from its admission to its first token. `max_waiting_requests` and `max_waiting_tokens`
    (prompt tokens) bound the waiting requests. A client beyond them gets an error that names `retry_after`.
    The default of `max_connections` follows from the limit of descriptors. `host` is the name or address to
    listen on. With `accepts_any_model`, requests may name any model. Browser pages of `allowed_origins` may
    use the server like its own pages. With `num_engines`, the process of each has its `engine_id`.
    """

    served_model_name: str  # the model's first name, which metrics use
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is needed
    admin_key: str | None = field(default=None, repr=False, kw_only=True)  # None: nothing can be scaled
    host: str = "127.0.0.1"
    allowed_origins: tuple[str, ...] = ()
    other_model_names: tuple[str, ...] = ()
    accepts_any_model: bool = False
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 2**24
    max_requests_per_key: int | None = None  # in flight at once; None: no bound of its own
    max_connections: int | None = None
    retry_after: int = 1
    max_body_bytes: int = 2**26  # fits a million token ids, or as many tokens of escaped text
    max_bodies_bytes: int = 2**29  # of all bodies that the server receives or reads at a time
    idle_timeout: float = 75.0  # for complete headers, after the connection or the last answer
    body_timeout: float = 120.0
    write_timeout: float = 600.0  # for a client to read from its stream
    keep_alive_interval: float = 5.0
    tool_call_parser: str | None = None  # the name of a call format; None: by the chat template
    engine_id: int = 0
    num_engines: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_waiting_requests",
            "max_waiting_tokens",
            "retry_after",
            "max_body_bytes",
            "max_bodies_bytes",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, but is {value}")
        for name in ("idle_timeout", "body_timeout", "write_timeout", "keep_alive_interval"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"{name} must be more than 0 seconds, but is {value:g}")
        for name in ("max_requests_per_key", "max_connections"):
            if (most := getattr(self, name)) is not None and most < 1:
                raise ConfigError(f"{name} must be at least 1, but is {most}")
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
        if not all(self.api_keys):
            raise ConfigError("an API key must not be empty")
        if self.admin_key == "":
            raise ConfigError("the admin key must not be empty")
        for origin in self.allowed_origins:
            if origin != ANY_ORIGIN and _ORIGIN.fullmatch(origin) is None:
                example = "neither an origin such as https://chat.example.com, nor *"
                raise ConfigError(f"--allowed-origins {origin!r} is {example}")

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """All names of the model, each once."""
        return tuple(dict.fromkeys((self.served_model_name, *self.other_model_names)))

    def allows_origin(self, origin: str) -> bool:
        """Return whether pages of another origin may use the server."""
        return ANY_ORIGIN in self.allowed_origins or origin in self.allowed_origins

    @property
    def host_names(self) -> frozenset[str]:
        """The names besides loopback names that a Host header may have, if the server checks it."""
        found = (_ORIGIN.fullmatch(origin) for origin in self.allowed_origins)
        return frozenset({self.host.lower(), *(origin["name"].strip("[]") for origin in found if origin)})
