"""The inputs of sampling a request's next token, in addition to its logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loong.core.instructions import RequestInput, Sibling
from loong.core.request import SamplingParams, TokenId
from loong.worker.sampling.grammar_constraints import AllowedTokens, ConstrainedRow, Constraints


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """The inputs of sampling one row, in addition to its logits.

    `position` is the absolute position of the token to be drawn. The prompt is read only if there is a
    repetition penalty, the output only if there is any. `allowed` None: all tokens are.
    """

    params: SamplingParams
    position: int
    num_output_tokens: int
    prompt_token_ids: Sequence[TokenId] = ()
    output_token_ids: Sequence[TokenId] = ()
    allowed: AllowedTokens | None = None

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


class DrawnToken(NamedTuple):
    """A token to be drawn for a request of a batch, or for its sibling.

    `new_token_ids` come after those that the batch was given.
    """

    drawn: Sibling
    given: RequestInput
    new_token_ids: Sequence[TokenId] = ()


def sampling_inputs(rows: Sequence[DrawnToken], constraints: Constraints) -> list[SamplingInput]:
    """Return the inputs of all rows of a step. The ranks of an instance call it together."""
    outputs = [
        (*given.output_token_ids, *new_token_ids) if drawn.sampling_params.needs_output else ()
        for drawn, given, new_token_ids in rows
    ]
    constrained = {
        index: ConstrainedRow(row.drawn.request_id, grammar, outputs[index], params.stop_token_ids)
        for index, row in enumerate(rows)
        if (grammar := (params := row.drawn.sampling_params).grammar) is not None
    }
    allowed = dict(zip(constrained, constraints.allowed([*constrained.values()]), strict=True))
    inputs = []
    for index, (drawn, given, new_token_ids) in enumerate(rows):
        params = drawn.sampling_params
        num_output_tokens = given.num_output_tokens + len(new_token_ids)
        inputs.append(
            SamplingInput(
                params=params,
                position=given.num_prompt_tokens + num_output_tokens,
                num_output_tokens=num_output_tokens,
                prompt_token_ids=given.prompt_token_ids,
                output_token_ids=outputs[index],
                allowed=_limited(allowed.get(index), params.allowed_token_ids, constraints),
            )
        )
    return inputs


def _limited(
    allowed: AllowedTokens | None, token_ids: Sequence[TokenId] | None, constraints: Constraints
) -> AllowedTokens | None:
    """Return the tokens that a grammar allows, of these; None: each does not matter."""
    if token_ids is None:
        return allowed
    words = constraints.mask_of(token_ids)
    return AllowedTokens(words) if allowed is None else allowed._replace(words=allowed.words & words)
