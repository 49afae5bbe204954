"""Parameters of sampling, for each row of logits, in device memory."""

from typing import NamedTuple

from torch import Tensor


class Penalties(NamedTuple):
    """The penalties of N rows, and the tokens that each row has seen, of a vocabulary of V; in device
    memory.
    """

    repetition: Tensor  # [N] float32, of all tokens seen; 1: none
    frequency: Tensor  # [N] float32, for each time in the output; 0: none
    presence: Tensor  # [N] float32, for having been in the output; 0: none
    is_in_prompt: Tensor  # [N, V] bool
    num_in_output: Tensor  # [N, V] int32


class DrawParams(NamedTuple):
    """The sampling parameters of N rows, in device memory."""

    temperature: Tensor  # [N] float64; 0: the likeliest, the lowest id of equals
    top_k: Tensor  # [N] int64, at least 1; as many as there are tokens: no limit
    top_p: Tensor  # [N] float64; 1: no limit
    min_p: Tensor  # [N] float64; 0: no limit
    seed: Tensor  # [N] int64, not negative
    position: Tensor  # [N] int64, of the token to be drawn
