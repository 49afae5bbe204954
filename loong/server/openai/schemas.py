"""The bodies of requests: fields of the OpenAI API, and those that vLLM adds, with vLLM's defaults."""

from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from loong.core.limits import MAX_TOKEN_ID, NUM_SEEDS
from loong.server.api.errors import bad_request
from loong.server.api.schema_base import Schema, as_integers, within
from loong.server.openai.messages import Messages
from loong.server.structured.free_json import FreeObject
from loong.server.structured.structured_outputs import (
    Alternatives,
    JsonSchema,
    ResponseFormat,
    Source,
    StructuredOutputs,
)
from loong.server.tools.fields import OfferedTools, ToolUseFields

MAX_PROMPTS = 256  # in one request
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_USER_LENGTH = 256  # characters
MAX_SALT_LENGTH = 1024  # characters

_TEXT = {"type": "string", "minLength": 1}
_ID = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
MAX_TOKEN_IDS_SCHEMA = {"type": "array", "items": _ID, "minItems": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS}
_LISTS = {"type": "array", "items": MAX_TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT = {"anyOf": [_TEXT, _TEXTS, MAX_TOKEN_IDS_SCHEMA, _LISTS]}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIdList = Annotated[list[_TokenId], BeforeValidator(as_integers, list[_TokenId])]
LogitBias = Annotated[float, within("logit_bias")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[_StopList, BeforeValidator(_as_list, StopString | _StopList)]


class StreamOptions(Schema):
    """Options of a stream besides its text."""

    include_usage: bool = False
    """The counts of tokens in a last chunk, without choices."""
    continuous_usage_stats: bool = False
    """The counts so far with every chunk, where `include_usage` is true."""
    include_obfuscation: bool = False
    """Padding against traffic analysis; there is none to include."""

    @property
    def has_counts_in_chunks(self) -> bool:
        """Return whether every chunk has the counts so far."""
        return self.include_usage and self.continuous_usage_stats


class SLOFields(Schema):
    """Targets in seconds. A missed target ends nothing. The default is the server's target."""

    ttft: Annotated[float, within("ttft")] | None = None
    """Time from the request to its first token."""
    tpot: Annotated[float, within("tpot")] | None = None
    """Time for each later token."""


class GenerationFields(Schema, ABC):
    """The fields of both kinds of completion."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: all that fit

    model: str | None = None
    """The name in `/v1/models`, or nothing."""
    max_tokens: Annotated[int, within("max_tokens", least=0)] | None = None
    """The most tokens to produce. By default 16 for a completion, and all that fit for a chat. 0 goes with
    `echo` or `prompt_logprobs`: the answer is about the prompt alone."""
    max_completion_tokens: Annotated[int, within("max_tokens", least=0)] | None = None
    """The newer name of `max_tokens`, which takes precedence."""
    min_tokens: Annotated[int, within("min_tokens")] = 0
    """Before this number of tokens, nothing ends the answer."""
    temperature: Annotated[float, within("temperature")] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, within("top_p", least=0)] = 1.0
    """Sample among the likeliest tokens that together have this probability; 0 takes the likeliest token."""
    top_k: Annotated[int, within("top_k", least=-1)] = 0
    """Sample among this number of the likeliest tokens; 0 and -1: all."""
    min_p: Annotated[float, within("min_p")] = 0.0
    """Sample among tokens with at least this fraction of the likeliest token's probability."""
    presence_penalty: Annotated[float, within("presence_penalty")] = 0.0
    """Subtracted from the logit of each token that the answer has."""
    frequency_penalty: Annotated[float, within("frequency_penalty")] = 0.0
    """Subtracted from the logit of a token for each time that the answer has it."""
    repetition_penalty: Annotated[float, within("repetition_penalty")] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens of the prompt and the answer."""
    logit_bias: Annotated[dict[str, LogitBias], Field(max_length=MAX_LOGIT_BIASES)] = {}
    """Added to the logits of tokens, by token id: from -100 to 100."""
    n: Annotated[int, within("n")] = 1
    """The number of choices for each prompt."""
    best_of: Annotated[int, within("n")] | None = None
    """The same number as `n`: choosing from more is not supported."""
    seed: Annotated[int, within("seed", least=-NUM_SEEDS)] | None = None
    """The seed of all samples; further choices count up from it. The default is a random one."""
    stop: StopStrings = []
    """The answer ends before the first of these strings."""
    stop_token_ids: Annotated[TokenIdList, Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    """The answer ends with the first of these tokens, whose text is left out."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the token that ends the answer, in the text."""
    allowed_token_ids: (
        Annotated[TokenIdList, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    """The answer has no other tokens. It ends with the model's end-of-sequence token only if that is one."""
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] = []
    """Words that the answer does not have, in the tokens that each has at the beginning of a text. A word of
    as many tokens after a blank does not come either."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    truncate_prompt_tokens: Annotated[int, within("max_tokens", least=-1)] | None = None
    """Keep this number of the prompt's last tokens; -1: as many as fit together with `max_tokens`."""
    response_format: ResponseFormat = ResponseFormat()
    """The format of the answer. A request may have one of this field and the next five."""
    structured_outputs: StructuredOutputs | None = None
    """The format of the answer, as in vLLM."""
    guided_json: JsonSchema | None = None
    """A JSON schema for the answer, as an object or as text."""
    guided_regex: Source | None = None
    """A regular expression that the whole answer matches. It has no lookaround, flags or back references."""
    guided_choice: Alternatives | None = None
    """The answer is one of these texts."""
    guided_grammar: Source | None = None
    """Rules for the answer, in the EBNF of GBNF files, or in Lark's notation."""
    user: Annotated[str, Field(max_length=MAX_USER_LENGTH)] = ""
    """The user of the request: `--fairness user` shares between users, or between API keys where there are
    several."""
    priority: Annotated[int, within("priority")] = 0
    """Lower is sooner: each step halves the time to the first token that the schedule allows."""
    slo: SLOFields | None = None
    """Targets of the request, instead of the server's."""
    cache_salt: CacheSalt | None = None
    """Share [cached KV](prefix-caching.md) only with requests of the same salt, a secret of those that share.
    The default is shared by all requests without a salt."""
    use_prefix_cache: bool = True
    """Read cached KV of other requests, and leave them its own."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """No effect, because no blanks are put between special tokens."""
    stream: bool = False
    """Send the answer as it grows, as server-sent events. The last one is `[DONE]`."""
    stream_options: StreamOptions = StreamOptions()
    """For streams only."""
    return_token_ids: bool = False
    """Return the ids of the prompt's and the answer's tokens as well."""
    return_tokens_as_token_ids: bool = False
    """Name each token in log probabilities `token_id:ID`."""
    prompt_logprobs: Annotated[int, within("prompt_logprobs")] | None = None
    """Return the log probability and the rank of each token of the prompt but the first, and those of this
    number of the likeliest tokens in its place. Not for streams."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _leaves_tokens(cls, most: int) -> int:
        if most == 0:
            raise ValueError("0 leaves no token; it must be 1 or more, or -1 for what fits")
        return most

    @field_validator("best_of")
    @classmethod
    def _is_n(cls, best_of: int, info: ValidationInfo) -> int:
        if best_of != (n := info.data.get("n", best_of)):
            side = "below" if best_of < n else "above"
            raise ValueError(f"{best_of} is {side} n, which is {n}; only as many as n are supported")
        return best_of

    @field_validator("stream_options")
    @classmethod
    def _is_for_streams(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("only requests with stream set to true have them")
        return options

    @field_validator("prompt_logprobs")
    @classmethod
    def _are_in_whole_answers(cls, prompt_logprobs: int, info: ValidationInfo) -> int:
        if info.data.get("stream"):
            raise ValueError("requests with stream set to true cannot have them")
        return prompt_logprobs

    @property
    def salt_digest(self) -> str:
        """Return a name for the salt that does not give it away, or nothing for no salt."""
        return (
            "" if self.cache_salt is None else blake2b(self.cache_salt.encode(), digest_size=16).hexdigest()
        )

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens an answer has at each position, or None for no logprobs."""

    @property
    def num_echoed_logprobs(self) -> int | None:
        """Return the same for the positions of an echoed prompt, or None if it is not echoed."""
        return None

    @property
    def is_about_prompt(self) -> bool:
        """Return whether the answer has data of the prompt, so that it may have no other."""
        return self.prompt_logprobs is not None


class CompletionFields(GenerationFields):
    """The body of `/v1/completions`."""

    prompt_field = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]  # validating a million ids one by one would be slow
    """A text, its token ids, or a list of either, each of which is answered."""
    add_special_tokens: bool = True
    """Begin a text with the tokens that the model expects there."""
    echo: bool = False
    """Begin the answer and its `logprobs` with the prompt. The first token of a prompt has none."""
    logprobs: Annotated[int, within("logprobs")] | None = None
    """Return the log probability of each token, and those of this number of the likeliest. `top_logprobs`
    always has the sampled token, as one entry more if it is not among the likeliest. Of tokens with equal
    text, the sampled or else the likeliest one is named by it, and the others are named `token_id:ID`."""

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationFields."""
        return self.logprobs

    @property
    def num_echoed_logprobs(self) -> int | None:
        """See GenerationFields."""
        return self.logprobs if self.echo else None

    @property
    def is_about_prompt(self) -> bool:
        """See GenerationFields."""
        return self.echo or super().is_about_prompt


class TemplateFields(Schema):
    """The fields of a chat that its template uses."""

    add_generation_prompt: bool = True
    """End the prompt where the assistant's turn begins."""
    continue_final_message: bool = False
    """End the prompt inside the last message, which the answer continues. Goes with `add_generation_prompt`
    set to false."""
    reasoning_effort: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")] | None = None
    """A name for the chat template, which many ignore."""
    chat_template_kwargs: FreeObject = {}
    """More names for the chat template."""

    @field_validator("continue_final_message")
    @classmethod
    def _goes_without_another_turn(cls, is_continued: bool, info: ValidationInfo) -> bool:
        if is_continued and info.data.get("add_generation_prompt"):
            raise ValueError("it goes with add_generation_prompt set to false")
        return is_continued


class ChatFields(ToolUseFields, TemplateFields, GenerationFields):
    """The body of `/v1/chat/completions`."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: Messages
    """The conversation so far, for the model's chat template."""
    add_special_tokens: bool = False
    """Begin with the tokens that the model expects there, which most templates write themselves."""
    logprobs: bool = False
    """Return the log probability of each token."""
    top_logprobs: Annotated[int, within("logprobs")] = 0
    """Return those of this number of the likeliest tokens as well. The sampled token is not added to them."""

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationFields. Raises a 400 for a number without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeFields(OfferedTools, TemplateFields):
    """The body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """By default yes for a text, no for a chat."""
    return_token_strs: bool = False
    """Return the vocabulary's piece of each token too, which need not be text."""


class DetokenizeFields(Schema):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIdList
