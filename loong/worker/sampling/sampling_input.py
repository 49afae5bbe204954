"""The inputs of sampling a request's next token, in addition to its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loong.core.instructions import RequestInput, Sibling
from loong.core.request import SamplingParams, TokenId
from loong.worker.sampling.grammar_constraints import Constraints


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """The inputs of sampling one row, in addition to its logits.

    `position` is the absolute position of the token to be drawn. The prompt is read only if there is a
    repetition penalty, the output only if there is any. `allowed` has a bit for each token, [V / 32] int32 on
    the host; None: all are.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int
    prompt_token_ids: Sequence[TokenId] = ()
    output_token_ids: Sequence[TokenId] = ()
    allowed: Tensor | None = None

    @property
    def has_logits_processors(self) -> bool:
        """Return whether its logits are changed before a token is drawn."""
        params = self.params
        return (
            self.num_output_tokens < params.min_tokens
            or params.has_penalties
            or params.logit_bias != ()
            or params.bad_words != ()
            or self.allowed is not None
        )


def sampling_input(
    drawn: Sibling, given: RequestInput, new_token_ids: Sequence[TokenId], constraints: Constraints
) -> SamplingInput:
    """Return the input of a request or of its sibling, with `new_token_ids` after those of its batch."""
    params = drawn.sampling_params
    output = (*given.output_token_ids, *new_token_ids) if params.needs_output else ()
    allowed = None if params.allowed_token_ids is None else constraints.mask_of(params.allowed_token_ids)
    if (grammar := params.grammar) is not None:
        by_grammar = constraints.allowed(drawn.request_id, grammar, output, params.stop_token_ids)
        allowed = by_grammar if allowed is None else by_grammar & allowed
    num_output_tokens = given.num_output_tokens + len(new_token_ids)
    return SamplingInput(
        params=params,
        position=given.num_prompt_tokens + num_output_tokens,
        num_output_tokens=num_output_tokens,
        prompt_token_ids=given.prompt_token_ids,
        output_token_ids=output,
        allowed=allowed,
    )
