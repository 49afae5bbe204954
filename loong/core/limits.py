"""The limits of the numbers of a request, and the errors of those beyond."""

from collections.abc import Mapping, Sequence
from math import log10

from loong.core.errors import InvalidRequestError

MAX_TOKENS = 2**31 - 1  # that a request may count
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 20
MAX_PRIORITY = 16
MAX_CHOICES = 16
NUM_SEEDS = 2**63

LIMITS: Mapping[str, tuple[float, float]] = {  # least and most of every number, by its name in the API
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (1, MAX_TOKENS),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 100.0),
    "seed": (0, NUM_SEEDS - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "logit_bias": (-100.0, 100.0),
    "n": (1, MAX_CHOICES),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "ttft": (1e-6, 1e9),  # seconds
    "tpot": (1e-6, 1e9),
}


def number_text(number: float) -> str:
    """Return a number as messages show it: an integer of more than 64 bits by its magnitude alone."""
    if isinstance(number, int):
        is_long = abs(number) >= 2**64
        return f"about {'-' * (number < 0)}1e{round(log10(abs(number)))}" if is_long else str(number)
    return f"{number:g}"


def check_limits(name: str, given: float) -> None:
    """Raise `InvalidRequestError` if a number is beyond the limits of its name."""
    low, high = LIMITS[name]
    if not low <= given <= high:
        raise beyond_limits(name, given, low, high)


def check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    """Raise `InvalidRequestError` if one of these can be no token id."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id <= MAX_TOKEN_ID:
            what = f"{name} holds token id {number_text(token_id)}"
            raise InvalidRequestError(f"{what}, but ids go from 0 to {MAX_TOKEN_ID}", param=name)


def beyond_limits(name: str, given: float, low: float, high: float) -> InvalidRequestError:
    """Return the error of a number beyond its limits."""
    limits = f"from {number_text(low)} to {number_text(high)}"
    return InvalidRequestError(f"{name} must be {limits}, but is {number_text(given)}", param=name)
