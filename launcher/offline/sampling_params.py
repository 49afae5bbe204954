"""The parameters of sampling in `LLM`, by vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of sampling; names, meanings and defaults as in vLLM, bounds as in the HTTP API.

    `max_tokens` None stands for all that fit. With `logprobs` or `prompt_logprobs`, outputs have the log
    probability of each token and of this number of the likeliest.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: Mapping[str, object] | None = None

    def body(self) -> dict[str, object]:
        """Return the same as fields of a completion in the HTTP API."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = body[name]
            if isinstance(value, Sequence) and not isinstance(value, str):
                body[name] = list(value)
        if self.structured_outputs is not None:
            body["structured_outputs"] = dict(self.structured_outputs)
        return body
