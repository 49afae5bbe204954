"""What a simulated run writes down, if that was asked for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import loong
from loong.decision_log.log import decision_log
from loong.launcher.simulate.cluster import SimulatedCluster
from loong.launcher.simulate.config import SimulateConfig
from loong.recording.lines import VERSION, Setting
from loong.recording.recorder import recording
from loong.scheduling import Observer


@contextmanager
def logs(config: SimulateConfig, policy: str, cluster: SimulatedCluster) -> Iterator[tuple[Observer, ...]]:
    """The observers that write the event log and the decision log of a run.

    Raises `ConfigError` if a file cannot be made.
    """
    observers: list[Observer] = []
    with ExitStack() as stack:
        if config.event_log is not None:
            setting = Setting(
                VERSION, loong.__version__, cluster.instances, policy, config.policy, cluster.cost_model
            )
            observers.append(stack.enter_context(recording(config.event_log, setting)))
        if config.decision_log is not None:
            observers.append(stack.enter_context(decision_log(config.decision_log)))
        yield tuple(observers)
