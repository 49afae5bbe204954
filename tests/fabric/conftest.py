import pytest
from socket_worlds import Carrier


@pytest.fixture(
    params=[
        Carrier.SOCKETS,
        Carrier.HOSTS,
        Carrier.ARENAS,
        Carrier.LINKS,
        Carrier.HOSTS_OF_ARENAS,
        *(
            pytest.param(carrier, marks=pytest.mark.multigpu)
            for carrier in (Carrier.GPU_ARENAS, Carrier.GPU_LINKS, Carrier.HOSTS_OF_GPUS)
        ),
    ],
    ids=lambda carrier: carrier.value,
)
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """Return the carrier of messages; the laws are the same for all."""
    found: Carrier = request.param
    return found
