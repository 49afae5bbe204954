"""Examples for each endpoint, and the answers of a server with the built-in model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ADDRESS = "localhost:8000"
MODEL = "loong-tiny"
JSON_HEADER = "-H 'Content-Type: application/json'"
ADMIN_KEY = "operators-key"
ADMIN_HEADER = f"-H 'Authorization: Bearer {ADMIN_KEY}'"


@dataclass(frozen=True, slots=True)
class Example:
    """One request. Its body and its answer are JSON; an answer may be events, and may be shortened."""

    purpose: str = ""
    body: str = ""
    answer: str = ""
    is_of_operator: bool = False  # sent with the admin key

    def command(self, method: str, path: str) -> str:
        """Return the curl command that sends the request and shows events as they arrive."""
        url = f"{ADDRESS}{path.format(model=MODEL)}"
        if self.is_of_operator:
            url += f" {ADMIN_HEADER}"
        if self.body:
            return f"curl -N {url} {JSON_HEADER} \\\n    -d '{self.body}'"
        return f"curl -X POST {url}" if method == "post" else f"curl {url}"


_COMPLETIONS = (
    Example(
        "A text is continued:",
        '{"prompt": "hello", "max_tokens": 8, "temperature": 0}',
        """\
{"id": "cmpl-c78e53a2fd924a0bb7db248cb10cadae", "object": "text_completion", "created": 1795327534,
 "model": "loong-tiny",
 "choices": [{"index": 0, "text": "[t>gBj~;", "logprobs": null, "finish_reason": "length",
              "stop_reason": null}],
 "usage": {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14,
           "prompt_tokens_details": {"cached_tokens": 0}}}""",
    ),
    Example(
        "A stream, with the token counts at the end (shown without the fields that all events have):",
        """\
{"prompt": "hello", "max_tokens": 2, "temperature": 0, "stream": true,
     "stream_options": {"include_usage": true}}""",
        """\
data: {"choices": [{"index": 0, "text": "[", "finish_reason": null}]}

data: {"choices": [{"index": 0, "text": "t", "finish_reason": "length"}]}

data: {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}}

data: [DONE]""",
    ),
    Example(
        "Two choices for each of two prompts, the first two of the first; a `seed` gives the same again:",
        '{"prompt": ["one", "two"], "n": 2, "max_tokens": 8, "seed": 7}',
    ),
    Example(
        "The log probability of each token, and those of the two likeliest in its place and of its own:",
        '{"prompt": "hello", "max_tokens": 1, "logprobs": 2, "temperature": 0}',
        """\
{"choices": [{"index": 0, "text": "[", "logprobs":
   {"tokens": ["["], "token_logprobs": [-0.9488317691950616],
    "top_logprobs": [{"[": -0.9488317691950616, "c": -1.5304739200739679}], "text_offset": [0]}}]}""",
    ),
    Example(
        "The log probabilities of the tokens of a prompt, each given those before it, and no answer:",
        '{"prompt": "hi", "max_tokens": 0, "echo": true, "logprobs": 1}',
        """\
{"choices": [{"index": 0, "text": "hi", "finish_reason": "length", "logprobs":
   {"tokens": ["<|bos|>", "h", "i"], "token_logprobs": [null, -12.19019785665763, -14.89418795529303],
    "top_logprobs": [null, {"}": -0.5006031110216469, "h": -12.19019785665763},
                     {"t": -0.002619294556948759, "i": -14.89418795529303}],
    "text_offset": [0, 0, 1]}}],
 "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3,
           "prompt_tokens_details": {"cached_tokens": 0}}}""",
    ),
    Example(
        "Targets of its own, a first token within 0.5 s and 0.03 s for each after it, and a place before "
        "others: each step of `priority` below 0 halves the time to a first token that the schedule allows:",
        '{"prompt": "hello", "max_tokens": 8, "slo": {"ttft": 0.5, "tpot": 0.03}, "priority": -1}',
    ),
    Example(
        "Token ids instead of text in both directions, and no end before `max_tokens`:",
        '{"prompt": [104, 105], "max_tokens": 4, "return_token_ids": true, "ignore_eos": true}',
        """\
{"choices": [{"index": 0, "text": "l=mo", "prompt_token_ids": [104, 105],
              "token_ids": [108, 61, 109, 111]}]}""",
    ),
    Example(
        "What cannot be served is refused by name:",
        '{"prompt": "hello", "max_tokens": -1}',
        """\
{"error": {"message": "max_tokens must be greater than or equal to 0, but is -1",
           "type": "invalid_request_error", "param": "max_tokens", "code": "invalid_value"}}""",
    ),
)

_CHATS = (
    Example(
        "A question:",
        '{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}',
        """\
{"id": "chatcmpl-430a812a7a5c4be592fa54a4bffd4097", "object": "chat.completion", "created": 1795327534,
 "model": "loong-tiny",
 "choices": [{"index": 0, "logprobs": null, "finish_reason": "length", "stop_reason": null,
              "message": {"role": "assistant", "content": "\\\\}rcP5[j"}}],
 "usage": {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17,
           "prompt_tokens_details": {"cached_tokens": 0}}}""",
    ),
    Example(
        "Streamed (again without what is the same in all events):",
        """\
{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0,
     "stream": true}""",
        """\
data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}

data: {"choices": [{"index": 0, "delta": {"content": "\\\\"}, "finish_reason": null}]}

data: {"choices": [{"index": 0, "delta": {"content": "}"}, "finish_reason": "length"}]}

data: [DONE]""",
    ),
    Example(
        "An answer that is JSON of a schema, whatever the model would rather say. `max_tokens` must leave it "
        "room to end in, for what is cut off is no JSON:",
        """\
{"messages": [{"role": "user", "content": "Rate it."}], "max_tokens": 200, "temperature": 0,
     "response_format": {"type": "json_schema", "json_schema": {"name": "rating", "schema":
       {"type": "object", "required": ["mood", "stars"], "properties": {
         "mood": {"enum": ["happy", "sad"]},
         "stars": {"type": "integer", "minimum": 1, "maximum": 5}}}}}}""",
        """\
{"choices": [{"index": 0, "finish_reason": "stop",
              "message": {"role": "assistant", "content": "{\\"mood\\":\\"sad\\",\\"stars\\":3}"}}]}""",
    ),
    Example(
        "A call of a tool, which the client runs. Its result goes into a turn of the role `tool`, with the "
        "`tool_call_id`:",
        """\
{"messages": [{"role": "user", "content": "Rate it."}], "max_tokens": 200, "temperature": 0,
     "tools": [{"type": "function", "function": {"name": "rate", "parameters":
       {"type": "object", "required": ["stars"], "properties": {
         "stars": {"type": "integer", "minimum": 1, "maximum": 5}}}}}],
     "tool_choice": "required", "parallel_tool_calls": false}""",
    ),
    Example(
        "Log probabilities, as chats have them:",
        """\
{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "temperature": 0,
     "logprobs": true, "top_logprobs": 1}""",
        """\
{"choices": [{"index": 0, "message": {"role": "assistant", "content": "\\\\"}, "logprobs": {"content":
   [{"token": "\\\\", "logprob": -0.34055905861661806, "bytes": [92],
     "top_logprobs": [{"token": "\\\\", "logprob": -0.34055905861661806, "bytes": [92]}]}]}}]}""",
    ),
    Example(
        "Earlier turns, how to draw, where to end, and for whom it is:",
        """\
{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"},
                  {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "and now?"}],
     "max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "stop": ["END"], "user": "alice"}""",
    ),
)

EXAMPLES: Mapping[tuple[str, str], Sequence[Example]] = {
    ("post", "/v1/completions"): _COMPLETIONS,
    ("post", "/v1/chat/completions"): _CHATS,
    ("post", "/generate"): (
        Example(
            body='{"inputs": "hello", "parameters": {"max_new_tokens": 8}}',
            answer="""\
{"generated_text": ["[t>gBj~;"], "count_output_tokens": 8, "finish_reason": "length", "prompt_tokens": 6}""",
        ),
    ),
    ("post", "/generate_stream"): (
        Example(
            body='{"inputs": "hello", "parameters": {"do_sample": true, "max_new_tokens": 1, "seed": 7}}',
            answer="""\
data: {"token": {"id": 91, "text": "[", "logprob": null, "special": false, "count_output_tokens": 1,
                 "prompt_tokens": 6},
       "generated_text": null, "finished": true, "finish_reason": "length", "details": null}""",
        ),
    ),
    ("post", "/v1/responses"): (
        Example(
            "A text, after instructions:",
            """\
{"instructions": "Be brief.", "input": "hello", "max_output_tokens": 16, "temperature": 0}""",
        ),
        Example(
            "A call of a function, streamed as typed events:",
            """\
{"input": "Rate it.", "max_output_tokens": 200, "temperature": 0, "stream": true,
     "tools": [{"type": "function", "name": "rate", "parameters":
       {"type": "object", "required": ["stars"], "properties": {
         "stars": {"type": "integer", "minimum": 1, "maximum": 5}}}}],
     "tool_choice": "required", "parallel_tool_calls": false}""",
        ),
        Example(
            "Its result, with the conversation so far, since nothing is stored:",
            """\
{"input": [{"role": "user", "content": "Rate it."},
               {"type": "function_call", "call_id": "call_1", "name": "rate",
                "arguments": "{\\"stars\\": 4}"},
               {"type": "function_call_output", "call_id": "call_1", "output": "done"}],
     "max_output_tokens": 16}""",
        ),
    ),
    ("get", "/v1/models"): (
        Example(
            answer="""\
{"object": "list", "data": [{"id": "loong-tiny", "object": "model", "created": 1795327539,
                             "owned_by": "loong", "max_model_len": 65536}]}"""
        ),
    ),
    ("get", "/v1/models/{model}"): (Example(),),
    ("post", "/tokenize"): (
        Example(
            body='{"prompt": "hello"}',
            answer="""\
{"count": 6, "max_model_len": 65536, "tokens": [256, 104, 101, 108, 108, 111], "token_strs": null}""",
        ),
        Example("A chat, with its template:", '{"messages": [{"role": "user", "content": "hi"}]}'),
    ),
    ("post", "/detokenize"): (Example(body='{"tokens": [104, 105]}', answer='{"prompt": "hi"}'),),
    ("get", "/health"): (Example(answer='{"status": "ok"}'),),
    ("get", "/ping"): (Example(),),
    ("post", "/ping"): (Example(),),
    ("get", "/version"): (Example(answer='{"version": "0.1.0"}'),),
    ("get", "/load"): (Example(answer='{"server_load": 0}'),),
    ("get", "/metrics"): (Example(),),
    ("get", "/trace"): (Example("Perfetto opens the trace, and so does `loong plot`."),),
    ("get", "/openapi.json"): (Example(),),
    ("post", "/reset_prefix_cache"): (
        Example("Where there is an admin key, no other is taken.", answer='{"status": "reset"}'),
    ),
    ("post", "/start_profile"): (
        Example("For a server with `--trace-dir traces`. Where there is an admin key, no other is taken."),
    ),
    ("post", "/admin/faults"): (
        Example(
            "For a server with `--allow-fault-injection` and `--admin-key operators-key`.",
            '{"fault": "pause", "seconds": 0.1}',
            '{"fault": "pause", "instance": 0}',
            is_of_operator=True,
        ),
    ),
    ("get", "/admin/instances"): (
        Example(
            "For a server with `--admin-key operators-key`.",
            answer="""\
{"num_instances": 1, "max_instances": 1, "memory_instances": 0, "is_done": true,
 "instances": [{"id": 0, "state": "serving", "kv_used": 0, "kv_capacity": 4096, "kind": "full"}]}""",
            is_of_operator=True,
        ),
    ),
    ("post", "/admin/scale"): (
        Example(
            "It answers at once, or with `?wait=true` when the change is done. A client that leaves does not "
            "end the change. A later change replaces it.",
            '{"num_instances": 1}',
            """\
{"num_instances": 1, "max_instances": 1, "memory_instances": 0, "is_done": true,
 "instances": [{"id": 0, "state": "serving", "kv_used": 0, "kv_capacity": 4096, "kind": "full"}]}""",
            is_of_operator=True,
        ),
    ),
    ("post", "/stop_profile"): (Example(answer='{"trace": "traces/trace-20261122-060539-1.json"}'),),
}
