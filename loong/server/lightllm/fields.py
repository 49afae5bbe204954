"""Bodies of `/generate` and `/generate_stream`, with LightLLM's names and defaults."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from loong.core.limits import NUM_SEEDS
from loong.server.api.errors import bad_request
from loong.server.api.schema_base import Schema, within
from loong.server.openai.schemas import MAX_TOKEN_IDS_SCHEMA, CacheSalt, CompletionFields, StopStrings
from loong.server.structured.structured_outputs import JsonSchema, Source

_INPUTS = {"anyOf": [{"type": "string", "minLength": 1}, MAX_TOKEN_IDS_SCHEMA]}


class GenerateParameters(Schema):
    """The generation parameters of `/generate`."""

    do_sample: bool = False
    """Sample tokens. By default the likeliest token is taken, and temperature and `top_p` have no effect."""
    temperature: Annotated[float, within("temperature")] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, within("top_p", least=0)] = 1.0
    """Sample among the likeliest tokens that together have this probability; 0 takes the likeliest token."""
    top_k: Annotated[int, within("top_k", least=-1)] = -1
    """Sample among this number of the likeliest tokens; 0 and -1: all."""
    max_new_tokens: Annotated[int, within("max_tokens")] = 16
    """The most tokens to produce."""
    min_new_tokens: Annotated[int, within("max_tokens")] = 1
    """Before this number of tokens, nothing ends the answer."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    stop_sequences: StopStrings = []
    """The answer ends before the first of these strings."""
    presence_penalty: Annotated[float, within("presence_penalty")] = 0.0
    """Subtracted from the logit of each token that the answer has."""
    frequency_penalty: Annotated[float, within("frequency_penalty")] = 0.0
    """Subtracted from the logit of a token for each time that the answer has it."""
    repetition_penalty: Annotated[float, within("repetition_penalty")] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens of the inputs and the answer."""
    return_details: bool = False
    """Return each token with its log probability."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    add_special_tokens: bool = True
    """Begin a text with the tokens that the model expects there."""
    n: Annotated[int, within("n")] | None = None
    """The number of answers. Streams have one."""
    best_of: Annotated[int, within("n")] | None = None
    """The same number as `n`."""
    regular_constraint: Source | None = None
    """A regular expression that the whole answer matches."""
    guided_json: JsonSchema | None = None
    """A JSON schema for the answer, as an object or as text."""
    guided_grammar: Source | None = None
    """Rules for the answer, in the EBNF of GBNF files, or in Lark's notation."""
    cache_salt: CacheSalt | None = None
    """As in completions."""
    use_prefix_cache: bool = True
    """As in completions."""
    seed: Annotated[int, within("seed", least=-NUM_SEEDS)] | None = None
    """The seed of all samples. By default each request gets a random one."""


class GenerateFields(Schema):
    """The body of `/generate` and `/generate_stream`."""

    inputs: Annotated[Any, WithJsonSchema(_INPUTS)]  # validating a million ids one by one would be slow
    """A text or its token ids."""
    parameters: Annotated[GenerateParameters, Field(default_factory=GenerateParameters)]

    def as_completion(self, *, is_streamed: bool) -> CompletionFields:
        """Return the equal completion request."""
        if isinstance(self.inputs, list) and self.inputs and isinstance(self.inputs[0], str | list):
            raise bad_request("inputs must be one text or one list of token ids", "inputs")
        asked = self.parameters
        n, best_of = asked.n or asked.best_of or 1, asked.best_of or asked.n or 1
        if n != best_of:
            message = f"best_of is {best_of} and n is {n}; only equal numbers are supported"
            raise bad_request(message, "parameters")
        if is_streamed and n > 1:
            raise bad_request(f"n is {n}, and a stream has one answer; /generate has several", "parameters")
        return CompletionFields.model_validate(
            {
                "prompt": self.inputs,
                "n": n,
                "temperature": asked.temperature if asked.do_sample else 0.0,
                "max_tokens": asked.max_new_tokens,
                "min_tokens": asked.min_new_tokens if asked.min_new_tokens > 1 else 0,
                "stop": asked.stop_sequences,
                "logprobs": 0 if asked.return_details else None,
                "guided_regex": asked.regular_constraint,
                "stream": is_streamed,
                **asked.model_dump(include=_SAME),
            }
        )


_SAME = {
    *("top_p", "top_k", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("skip_special_tokens", "add_special_tokens", "guided_json", "guided_grammar"),
    *("cache_salt", "use_prefix_cache"),
}
