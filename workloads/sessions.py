"""Sessions among the requests of a workload."""

from collections.abc import Sequence
from typing import TypeAlias

from loong.workloads.request import WorkloadRequest

Places: TypeAlias = Sequence[int]
"""The places of a session's turns in the sequence of all requests; a request without a session is its own."""


def places_of_sessions(requests: Sequence[WorkloadRequest]) -> list[Places]:
    """Return every session in the order of the first turns."""
    sessions: list[list[int]] = []
    for place, request in enumerate(requests):
        if request.shape.is_follower:
            sessions[-1].append(place)
        else:
            sessions.append([place])
    return list(sessions)
