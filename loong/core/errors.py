"""Every error loong raises on purpose.

LoongError
├── ConfigError            an operator's value: a flag, a file, a model's config  (also ValueError)
├── InvalidRequestError    a client's request                                     (also ValueError)
├── RequestTooLargeError   a live request does not fit the cluster that is asked for
├── InvalidPlanError       a policy broke a rule of the cluster: a bug
├── InvalidEventError      a worker reported what cannot have happened: a bug
└── ClusterError           the cluster cannot go on with what it was asked
    ├── EngineStoppedError     the engine has failed or ended, and makes no more tokens
    ├── RequestFailedError     a request cannot go on, and a retry would not help
    └── (loong.fabric.errors)  a peer is lost, a deadline has passed
"""


class LoongError(Exception):
    """Root of the tree above."""


class ConfigError(LoongError, ValueError):
    """A flag, file or model config has a value that cannot work; names it, and what would."""


class InvalidRequestError(LoongError, ValueError):
    """A request cannot be served; `param` names the field at fault, as in the OpenAI API."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLargeError(LoongError):
    """A live request may need more KV than the cluster would have; names both numbers."""


class InvalidPlanError(LoongError):
    """A plan breaks a rule of the cluster. A policy that makes one has a bug."""


class InvalidEventError(LoongError):
    """An event contradicts the cluster's state. Its sender has a bug."""


class ClusterError(LoongError):
    """The cluster lost what it needs to go on."""


class RequestFailedError(ClusterError):
    """A request cannot go on; `code` is the cause as clients see it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineStoppedError(ClusterError):
    """The engine makes no more tokens. Clients receive this message; `/health` and the log have the cause."""

    def __init__(self) -> None:
        super().__init__("the engine of this server has stopped, so it makes no more tokens; try again later")
