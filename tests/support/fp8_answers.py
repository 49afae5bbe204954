"""Answers with keys and values in FP8, and what it means that two of them are the same.

A value between two steps of FP8 may be rounded to either by an error of float32. So log-probabilities differ
by more than rounding, and of two tokens that are as likely either may be chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from cluster import Cluster
from plans import in_group

from loong.core.events import ProducedToken
from loong.core.request import Request, RequestId

Answer = list[tuple[int, float]]  # each token with its log-probability
_AS_LIKELY = 0.02


def answers(
    requests: Sequence[Request], outputs: Mapping[RequestId, Sequence[ProducedToken]]
) -> list[Answer]:
    """Return the answer to each request."""
    found = [outputs[request.request_id] for request in requests]
    return [[(t.token_id, t.logprobs.chosen if t.logprobs else 0.0) for t in tokens] for tokens in found]


def alone(cluster: Cluster, request: Request) -> Answer:
    """Return the answer to a request that one instance computes at once, without what is cached."""
    copied = replace(request, request_id=f"{request.request_id}-alone", cache_salt="alone")
    return answers([copied], cluster.run([copied], in_group(0, chunk=200, num_steps=3)))[0]


def assert_same(found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """Each answer has the tokens of the other, up to one that is as likely as the other's."""
    for answer, other in zip(found, wanted, strict=True):
        assert len(answer) == len(other)
        for (token, logprob), (other_token, other_logprob) in zip(answer, other, strict=True):
            assert logprob == pytest.approx(other_logprob, abs=_AS_LIKELY), (answer, other)
            if token != other_token:
                break  # what follows answers another text
