"""Batches submitted before the sampled tokens of the previous batch are known (token placeholders)."""

from collections.abc import Mapping
from dataclasses import replace

from loong.core.errors import InvalidPlanError
from loong.core.events import ProducedToken
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.worker.steps.pending_step import PendingStep
from loong.worker.steps.step_inputs import PendingTokenIds


class PendingTokens:
    """The tokens that the last step of a batch samples here, known or still to be sampled by the device."""

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.pending: PendingStep | None = None
        self.tokens: Mapping[RequestId, ProducedToken] = {}

    def resolve(self, tokens: tuple[ProducedToken, ...]) -> None:
        """Set the tokens, which are now known."""
        self.tokens, self.pending = {token.request_id: token for token in tokens}, None


class TokenPlaceholders:
    """A batch, and its missing tokens: the newest ones of requests that the previous batch samples here.

    Raises `InvalidPlanError`, at once or when they are read, if this instance does not have them.
    """

    def __init__(self, command: RunBatch, instance_id: InstanceId, before: PendingTokens) -> None:
        self.command, self._instance_id, self._before = command, instance_id, before
        self._dependents: Mapping[RequestId, RequestInput] = {}
        if all(given.depends_on_batch_id is None for given in command.inputs):
            return
        own = {block.request_id for block in command.plan.queries if block.master_id == instance_id}
        self._dependents = {
            given.request_id: given
            for given in command.inputs
            if given.depends_on_batch_id is not None and given.request_id in own
        }
        for given in self._dependents.values():
            if given.depends_on_batch_id != before.batch_id:
                raise InvalidPlanError(
                    f"request {given.request_id} depends on batch {given.depends_on_batch_id} "
                    f"on instance {instance_id}, but batch {before.batch_id} was the last there"
                )

    @property
    def needs_tokens(self) -> bool:
        """Return whether the batch needs, before it begins, tokens that the device has yet to sample."""
        if self._before.pending is None:
            return False
        return any(
            given.sampling_params is not None and given.sampling_params.needs_output
            for given in self._dependents.values()
        )

    def begun(self) -> RunBatch:
        """Return the batch as `resolved` does, but with ids of 0 for tokens still to be sampled."""
        if (pending := self._before.pending) is None:
            return self.resolved()
        return self._with({i: ProducedToken(i, 0) for i in pending.sources})

    def pending_token_ids(self, rows: Mapping[RequestId, int]) -> PendingTokenIds | None:
        """Return the ids still to be sampled; `rows` are the last rows of requests in a step."""
        if (pending := self._before.pending) is None:
            return None
        return pending.pending_token_ids({i: rows[i] for i in self._dependents})

    def resolved(self) -> RunBatch:
        """Return the batch with its tokens, once the previous batch has been finished."""
        return self._with(self._before.tokens)

    def _with(self, tokens: Mapping[RequestId, ProducedToken]) -> RunBatch:
        if not self._dependents:
            return self.command
        for request_id in self._dependents:
            if request_id not in tokens:
                raise InvalidPlanError(
                    f"request {request_id} depends on batch {self._before.batch_id}, "
                    f"which samples no token of it on instance {self._instance_id}"
                )
        inputs = tuple(
            given.with_token(tokens[given.request_id]) if given.request_id in self._dependents else given
            for given in self.command.inputs
        )
        return replace(self.command, inputs=inputs)
