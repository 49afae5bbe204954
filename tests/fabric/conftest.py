import pytest
from socket_worlds import Carrier


@pytest.fixture(
    params=[
        Carrier.SOCKETS,
        Carrier.HOSTS,
        Carrier.ARENAS,
        pytest.param(Carrier.GPU_ARENAS, marks=pytest.mark.multigpu),
    ],
    ids=lambda carrier: carrier.value,
)
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """Return the carrier of messages; the laws are the same for all."""
    found: Carrier = request.param
    return found
