"""Tokens held back until the log probabilities of their prompt are there."""

from loong.core.errors import ClusterError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import AssembledLogprobs, PromptLogprobs
from loong.core.request import Request
from loong.engine.client import PutToken


class HeldTokens:
    """The tokens of a request's choices, behind the log probabilities of its whole prompt.

    Each instance reports its part of these by itself, so the first token may come before the last part.
    """

    def __init__(self, request: Request, num_top: int, put: PutToken) -> None:
        self._gathered = AssembledLogprobs(request.request_id, len(request.prompt_token_ids), num_top)
        self._put = put
        self._held: list[ProducedToken] | None = []

    def put(self, item: ProducedToken | PromptLogprobs | ClusterError) -> None:
        """Take a token of any choice, or the error that ends them all; see `PutToken`."""
        if self._held is None or not isinstance(item, ProducedToken):
            self._put(item)
        else:
            self._held.append(item)

    def take(self, part: PromptLogprobs) -> bool:
        """Take what an instance found; return whether nothing is missing any more."""
        self._gathered.add(part)
        if not self._gathered.is_complete:
            return False
        held, self._held = self._held or (), None
        self._put(self._gathered.whole)
        for token in held:
            self._put(token)
        return True
