"""A request that has not ended, with all that another engine needs to go on with it."""

from dataclasses import dataclass, field, replace

from loong.core.request import Continuation, NewRequest, RequestId, TokenId
from loong.engine.client import PutToken


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request with its output so far, by choice that has not ended.

    `blocks` are those of its prompt that a cache may have. `work` is what it counts as at engine `engine_id`
    (None: it waits for one), with its known tokens while `is_prompt_counted`. Answers of an earlier `attempt`
    are void. `num_losses` engines were lost in a row when it had `num_at_loss` tokens. `parents` are those of
    its spans.
    """

    request: NewRequest
    put: PutToken
    outputs: dict[RequestId, list[TokenId]]
    blocks: list[int]
    parents: dict[RequestId, str] = field(default_factory=dict)
    engine_id: int | None = None
    work: int = 0
    is_prompt_counted: bool = False
    attempt: int = 0
    first_token_at: float | None = None
    has_counted_cached: bool = False
    num_losses: int = 0
    num_at_loss: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens of choices that have not ended."""
        return sum(map(len, self.outputs.values()))

    @property
    def num_known_tokens(self) -> int:
        """The tokens whose KV the next engine needs."""
        return len(self.request.prompt_token_ids) + self.num_tokens

    def continued(self, now: float) -> NewRequest:
        """Return the request with the output that it has. Several choices have none."""
        if not self.num_tokens:
            return self.request
        (output,) = self.outputs.values()
        age = 0.0 if self.first_token_at is None else now - self.first_token_at
        return replace(self.request, continues=Continuation(tuple(output), age))

    def parts(self) -> "list[OpenRequest]":
        """Return what is to go on at another engine: itself, or each choice once one has a token or has
        ended.
        """
        request = self.request
        if request.num_choices == 1 or (len(self.outputs) == request.num_choices and not self.num_tokens):
            return [self]
        return [self._part(choice) for choice in request.choices() if choice.request_id in self.outputs]

    def count_loss(self) -> None:
        """Count the loss of its engine. A row of losses ends with a new token."""
        self.num_losses = self.num_losses + 1 if self.num_tokens == self.num_at_loss else 1
        self.num_at_loss = self.num_tokens

    def _part(self, choice: NewRequest) -> "OpenRequest":
        choice_id = choice.request_id
        output = self.outputs[choice_id]
        parents = {i: parent for i, parent in self.parents.items() if i == choice_id}
        return replace(
            self, request=choice, outputs={choice_id: output}, parents=parents, num_at_loss=len(output)
        )
