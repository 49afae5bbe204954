"""The fork server of workers on this host. Importing this module takes little, so that it can start early."""

from collections.abc import Mapping
from types import MappingProxyType

from loong.processes.fork_server import ForkServer
from loong.worker.config import ENVIRONMENT

NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
_WORKER = "loong.worker.process"


def worker_fork_server(environment: Mapping[str, str] = NOTHING_MORE) -> ForkServer:
    """Start what starts workers, of any number of clusters, with some more variables."""
    return ForkServer(_WORKER, {**ENVIRONMENT, **environment})
