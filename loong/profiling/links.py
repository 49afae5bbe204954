"""The bandwidth and latency of links, from the times of migrations."""

from collections.abc import Iterable, Sequence

import numpy as np

from loong.scheduler.cost.fit import MigrationSample
from loong.scheduler.cost.network import LinkRates, Links

LEAST_SAMPLES = 4  # of a kind of link
_LEAST_SECONDS = 1e-9  # a token


def measured_links(
    samples: Iterable[MigrationSample], host_ids: Sequence[int], kv_bytes: float, usual: Links
) -> Links:
    """Return the links within a host and between hosts, of tokens with `kv_bytes` each.

    Of one host, or with too few samples of either kind, they are the `usual` ones.
    """
    near, far = list[MigrationSample](), list[MigrationSample]()
    for sample in samples:
        if max(sample.source_id, sample.destination_id) < len(host_ids):  # no host tier
            is_near = host_ids[sample.source_id] == host_ids[sample.destination_id]
            (near if is_near else far).append(sample)
    if min(len(near), len(far)) < LEAST_SAMPLES:
        return usual
    return Links(_rates(near, kv_bytes), _rates(far, kv_bytes))


def _rates(samples: Sequence[MigrationSample], kv_bytes: float) -> LinkRates:
    """Return the line of least relative errors through the times."""
    num_tokens = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.stack([np.ones_like(num_tokens), num_tokens], axis=1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    return LinkRates(float(kv_bytes / max(slope, _LEAST_SECONDS)), max(0.0, float(latency)))
