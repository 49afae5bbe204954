"""Tokens held back until all log probabilities of their prompt are known."""

from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import AssembledLogprobs, PromptLogprobs
from loong.core.request import NewRequest
from loong.engine.client import Answered, PutToken


class HeldTokens:
    """Holds the tokens of a request's choices back until the log probabilities of its whole prompt are known.

    Instances report their parts independently, so the first token may arrive before the last part.
    """

    def __init__(self, request: NewRequest, num_top: int, put: PutToken) -> None:
        self._gathered = AssembledLogprobs(request.request_id, len(request.prompt_token_ids), num_top)
        self._put = put
        self._held: list[ProducedToken] | None = []

    def put(self, item: Answered) -> None:
        """Take a token of any choice, or the error that ends all choices; see `PutToken`."""
        if self._held is None or not isinstance(item, ProducedToken):
            self._put(item)
        else:
            self._held.append(item)

    def take(self, part: PromptLogprobs) -> bool:
        """Take an instance's part, and return whether the log probabilities are complete."""
        self._gathered.add(part)
        if not self._gathered.is_complete:
            return False
        held, self._held = self._held or (), None
        self._put(self._gathered.whole)
        for token in held:
            self._put(token)
        return True
