"""Batches that follow another whose tokens nobody knew when they were told."""

from collections.abc import Mapping
from dataclasses import replace

from loong.core.errors import InvalidPlanError
from loong.core.events import ProducedToken
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.worker.pending_step import PendingStep
from loong.worker.step_inputs import DrawnIds


class NewestTokens:
    """The tokens that the last step of one batch samples here: known, or for the device to draw."""

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.pending: PendingStep | None = None
        self.tokens: Mapping[RequestId, ProducedToken] = {}

    def tell(self, tokens: tuple[ProducedToken, ...]) -> None:
        """They are known."""
        self.tokens, self.pending = {token.request_id: token for token in tokens}, None


class Following:
    """A batch, and what it lacks: the newest tokens of requests that the batch before samples here.

    Raises InvalidPlanError, if not at once then when they are asked for, if this instance does not have them.
    """

    def __init__(self, command: RunBatch, instance_id: InstanceId, before: NewestTokens) -> None:
        self.command, self._instance_id, self._before = command, instance_id, before
        self._followers: Mapping[RequestId, RequestInput] = {}
        if all(given.follows is None for given in command.inputs):
            return
        own = {block.request_id for block in command.plan.queries if block.master_id == instance_id}
        self._followers = {
            given.request_id: given
            for given in command.inputs
            if given.follows is not None and given.request_id in own
        }
        for given in self._followers.values():
            if given.follows != before.batch_id:
                raise InvalidPlanError(
                    f"request {given.request_id} follows batch {given.follows} on instance {instance_id}, "
                    f"but batch {before.batch_id} was the last there"
                )

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know tokens that the device has yet to draw before the batch can begin."""
        if self._before.pending is None:
            return False
        return any(
            given.sampling_params is not None and given.sampling_params.needs_output
            for given in self._followers.values()
        )

    def begun(self) -> RunBatch:
        """As `resolved`, but with ids of 0 where the device has yet to draw them."""
        if (pending := self._before.pending) is None:
            return self.resolved()
        return self._with({i: ProducedToken(i, 0) for i in pending.sources})

    def drawn_ids(self, rows: Mapping[RequestId, int]) -> DrawnIds | None:
        """Those that the device has yet to draw; `rows` are the last ones of requests in a step."""
        if (pending := self._before.pending) is None:
            return None
        return pending.drawn_ids({i: rows[i] for i in self._followers})

    def resolved(self) -> RunBatch:
        """The batch as if the tokens had been known; the batch before has been finished."""
        return self._with(self._before.tokens)

    def _with(self, tokens: Mapping[RequestId, ProducedToken]) -> RunBatch:
        if not self._followers:
            return self.command
        for request_id in self._followers:
            if request_id not in tokens:
                raise InvalidPlanError(
                    f"request {request_id} follows batch {self._before.batch_id}, "
                    f"which samples no token of it on instance {self._instance_id}"
                )
        inputs = tuple(
            given.following(tokens[given.request_id]) if given.request_id in self._followers else given
            for given in self.command.inputs
        )
        return replace(self.command, inputs=inputs)
