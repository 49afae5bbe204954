"""The fork server of workers on this host. Importing this module takes little, so that it can start early."""

from loong.processes.fork_server import ForkServer
from loong.worker.config import ENVIRONMENT

_WORKER = "loong.worker.process"


def worker_fork_server() -> ForkServer:
    """Start what starts workers, of any number of clusters."""
    return ForkServer(_WORKER, ENVIRONMENT)
