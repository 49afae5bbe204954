"""Links are measured by migrations where there are several hosts."""

from random import Random

import pytest

from loong.profiling.links import LEAST_SAMPLES, measured_links
from loong.scheduler.cost.fit import MigrationSample
from loong.scheduler.cost.network import LinkRates, Links

USUAL = Links(LinkRates(1.0, 1.0), LinkRates(1.0, 1.0))
TRUE = Links(LinkRates(4e9, 1e-4), LinkRates(1e9, 5e-4))
KV_BYTES = 2048.0
HOST_IDS = (0, 0, 1, 1)


def samples(number: int, source_id: int, destination_id: int) -> list[MigrationSample]:
    """Return migrations whose times are those of TRUE links, and up to 2 % more."""
    random, found = Random(number), []
    is_near = HOST_IDS[source_id] == HOST_IDS[destination_id]
    rates = TRUE.within_host if is_near else TRUE.between_hosts
    for place in range(number):
        num_tokens = 10 * 4**place
        seconds = rates.latency + num_tokens * KV_BYTES / rates.bandwidth
        noisy = seconds * (1 + 0.02 * random.random())
        found.append(MigrationSample(num_tokens, source_id, destination_id, noisy))
    return found


def test_bandwidth_and_latency_of_both_kinds_are_found() -> None:
    found = measured_links([*samples(8, 0, 1), *samples(8, 2, 1)], HOST_IDS, KV_BYTES, USUAL)
    for rates, true in ((found.within_host, TRUE.within_host), (found.between_hosts, TRUE.between_hosts)):
        assert rates.bandwidth == pytest.approx(true.bandwidth, rel=0.05)
        assert rates.latency == pytest.approx(true.latency, rel=0.05)


def test_usual_links_stay_where_one_kind_was_not_measured() -> None:
    near = samples(LEAST_SAMPLES, 0, 1)
    few = samples(LEAST_SAMPLES - 1, 0, 2)
    assert measured_links(near, HOST_IDS, KV_BYTES, USUAL) is USUAL
    assert measured_links([*near, *few], HOST_IDS, KV_BYTES, USUAL) is USUAL
    tiers = [MigrationSample(10, 0, 4, 1.0) for _ in range(LEAST_SAMPLES)]
    assert measured_links([*near, *tiers], HOST_IDS, KV_BYTES, USUAL) is USUAL
