"""The answer to one request as it grows, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loong.core.errors import ClusterError, InvalidRequestError
from loong.core.events import Logprobs, ProducedToken
from loong.core.grammar import MASK_SECONDS_PER_TOKEN, MAX_MASK_SECONDS
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, TokenId
from loong.server.api.errors import ApiError, bad_request
from loong.server.text.detokenizer import IncrementalDetokenizer, TokenDecoder
from loong.server.text.stop_strings import StopStrings
from loong.server.tools.parser import CallParser
from loong.server.tools.parts import Part
from loong.server.tools.use import ToolUse


class Delta(NamedTuple):
    """The part of an answer that one token adds. Its text may be more or less than the token's own.

    `choice` is the index of the answer in its request, `index` is the index of the token in the answer.
    `text_offset` is the offset of the token's own text in the answer, in characters. `stop_reason` is the
    stop string or token of the request that ended the answer, or None. The first delta of an answer has the
    `prompt_logprobs`. `parts` are the new parts of an answer that may call tools, and None for other answers.
    If `is_cut`, the answer ends inside a call. The first delta of a request has its `num_cached_tokens`.
    """

    choice: int
    index: int  # type: ignore[assignment]  # hides a tuple's method
    text: str
    token_id: TokenId
    text_offset: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | TokenId | None = None
    prompt_logprobs: PromptLogprobs | None = None
    parts: Sequence[Part] | None = None
    is_cut: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options that turn tokens into an answer's text. An answer about the prompt only has no tokens."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()  # of the request
    includes_stop: bool = False  # the text ends with the stop string, or the text of the stop token
    skip_special_tokens: bool = True
    is_prompt_only: bool = False
    grammar_field: str | None = None  # the request's field with the grammar
    limiting_fields: tuple[str, ...] = ()  # others that limit the tokens
    tools: ToolUse | None = None  # the tool calls that the text may have
    kept_token_ids: frozenset[TokenId] = frozenset()  # special tokens whose text is never skipped


class Output:
    """Turns tokens into deltas. It never changes the text of earlier deltas."""

    def __init__(
        self, request: NewRequest, options: OutputOptions, decoder: TokenDecoder, choice: int = 0
    ) -> None:
        self._choice = choice
        self._min_tokens = request.sampling_params.min_tokens
        self._options = options
        self._detokenizer = IncrementalDetokenizer(
            decoder,
            prompt_token_ids=request.prompt_token_ids,
            skip_special_tokens=options.skip_special_tokens,
            kept_token_ids=options.kept_token_ids if options.skip_special_tokens else (),
        )
        self._calls = None if options.tools is None else options.tools.parser()
        self._stop_strings = StopStrings(options.stop_strings, is_included=options.includes_stop)
        self._num_characters = 0  # detokenized, sent or held back
        self.num_tokens = 0

    def add(self, token: ProducedToken) -> Delta:
        """Take the next token.

        Raises `ClusterError` if the request failed, and `InvalidRequestError` if no token is allowed. Raises
        a 400 if the tokens that its grammar allows take too long to find.
        """
        if token.finish_reason is FinishReason.STUCK:
            raise self._stuck()
        if token.finish_reason is FinishReason.COSTLY:
            raise _too_costly(self._options.grammar_field, self.num_tokens)
        if token.finish_reason is FinishReason.ERROR:
            raise ClusterError(
                f"request {token.request_id} failed after {self.num_tokens} tokens: the model's logits are "
                "not finite"
            )
        self.num_tokens += 1
        if self._options.is_prompt_only:
            return Delta(self._choice, 0, "", token.token_id, 0, finish_reason=FinishReason.LENGTH)
        offset = self._num_characters
        text = self._certain_text(self._new_text(token), is_last=token.finish_reason is not None)
        finish_reason, stop_reason = self._finish(token)
        delta = Delta(
            self._choice,
            self.num_tokens - 1,
            text,
            token.token_id,
            offset,
            token.logprobs,
            finish_reason,
            stop_reason,
        )
        return delta if self._calls is None else self._with_parts(delta, self._calls)

    def _stuck(self) -> InvalidRequestError:
        """Return the error of an answer that no token can continue."""
        field, others = self._options.grammar_field, self._options.limiting_fields
        what = "the grammar allows no token" if field is not None and not others else "no token is allowed"
        names = [*([] if field is None else [field]), *others]
        message = f"{' and '.join(names)}: {what} after {self.num_tokens} of the answer"
        return InvalidRequestError(message, param=next(iter(names), None))

    def _with_parts(self, delta: Delta, calls: CallParser) -> Delta:
        """Return the delta with the parts of its text. A call that must be the only one ends the answer."""
        parts = calls.add(delta.text)
        if delta.finish_reason is not None:
            parts += calls.finish()
        elif calls.is_done:
            delta = delta._replace(finish_reason=FinishReason.STOP)
        return delta._replace(parts=parts, is_cut=calls.is_cut)

    def _new_text(self, token: ProducedToken) -> str:
        """Return the token's text before the search for stop strings. A stop token may be left out."""
        is_left_out = token.finish_reason is FinishReason.STOP and not self._options.includes_stop
        text = "" if is_left_out else self._detokenizer.add(token.token_id)
        if token.finish_reason is not None:
            text += self._detokenizer.finish()
        self._num_characters += len(text)
        return text

    def _certain_text(self, text: str, *, is_last: bool) -> str:
        if not self._options.stop_strings:
            return text
        text = self._stop_strings.add(text, may_end=self.num_tokens > self._min_tokens)
        return text + self._stop_strings.finish() if is_last else text

    def _finish(self, token: ProducedToken) -> tuple[FinishReason | None, str | TokenId | None]:
        if self._stop_strings.matched is not None:
            return FinishReason.STOP, self._stop_strings.matched
        is_named = token.finish_reason is FinishReason.STOP and token.token_id in self._options.stop_token_ids
        return token.finish_reason, token.token_id if is_named else None


def _too_costly(field: str | None, num_tokens: int) -> ApiError:
    what = f"{field}: after {num_tokens} tokens of the answer, finding the next ones of its grammar"
    per_token = f"{MASK_SECONDS_PER_TOKEN * 1000:g} ms a token"
    limits = f"{MAX_MASK_SECONDS:g} s at once, or {per_token} and {MAX_MASK_SECONDS:g} s in all"
    return bad_request(f"{what} takes more than {limits}", field, "grammar_too_costly")
