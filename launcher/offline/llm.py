"""`LLM`: generate from many prompts at once, in this process."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Self, TypeAlias
from weakref import finalize

from loong.core.errors import InvalidRequestError
from loong.launcher.offline.answers import Job, OfflineFields, invalid_requests
from loong.launcher.offline.engine_thread import EngineThread
from loong.launcher.offline.many import generate_many
from loong.launcher.offline.options import offline_config
from loong.launcher.offline.outputs import RequestOutput
from loong.launcher.offline.prompts import GivenPrompt, given_prompts
from loong.launcher.offline.sampling_params import SamplingParams
from loong.server.api.parsing import Fields, check
from loong.server.openai.chat import prompt_of_chat
from loong.server.openai.schemas import ChatFields

SamplingInput: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model on instances that belong to this program. It ends with the program, `shutdown` or `with`.

    Keyword arguments are the flags of `loong serve` for model, cluster and scheduling, with `_` for `-`, such
    as `tensor_parallel_size`, `num_instances` or `max_model_len`. There is one instance, on a GPU where one
    is found, and no latency target: steps are as large as is efficient.

    Raises `ConfigError` for an unknown or wrong option, or if the model does not fit.
    """

    def __init__(self, model: str | None = None, **options: object) -> None:
        config = offline_config(model, options)
        self._engine = EngineThread(config)
        self._finalizer = finalize(self, self._engine.stop)
        self._numbers = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the workers. Later calls of `generate` raise `EngineStoppedError`."""
        self._finalizer()

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingInput = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return an output for each prompt, in the same order.

        A prompt is a text, token ids (a list, a tuple or an array), or a dictionary with `prompt` or
        `prompt_token_ids`. `prompts` is one of these or any iterable of them. `sampling_params` are for all,
        or a list with those of each. Raises `InvalidRequestError`, which names the prompt, before others are
        finished.
        """
        return self._generate(given_prompts(prompts), sampling_params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        sampling_params: SamplingInput = None,
        *,
        use_tqdm: bool = True,
        **template_fields: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, by the model's chat template.

        `template_fields` are those of the HTTP API: `add_generation_prompt`, `continue_final_message`,
        `chat_template_kwargs`, `tools` and others.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        several = [messages] if is_one else messages
        server = self._engine.server
        prompts = []
        for conversation in several:
            turns = [dict(turn) for turn in conversation if isinstance(turn, Mapping)]
            fields = _checked({"messages": turns, **template_fields}, ChatFields)

            async def rendered(fields: ChatFields = fields) -> GivenPrompt:
                return GivenPrompt(None, list((await prompt_of_chat(fields, server)).token_ids))

            with invalid_requests():
                prompts.append(self._engine.call(rendered).result())
        return self._generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _generate(
        self, prompts: Sequence[GivenPrompt], sampling_params: SamplingInput, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        jobs = list(self._jobs(prompts, sampling_params))
        return generate_many(self._engine, jobs, use_tqdm=use_tqdm)

    def _jobs(self, prompts: Sequence[GivenPrompt], sampling_params: SamplingInput) -> Iterable[Job]:
        """Yield the work on each prompt. Raises `InvalidRequestError` if parameters are wrong."""
        if isinstance(sampling_params, Sequence) and len(sampling_params) != len(prompts):
            what = f"there are {len(prompts)} prompts, but {len(sampling_params)} sampling_params"
            raise InvalidRequestError(what, param="sampling_params")
        checked: dict[int, OfflineFields] = {}
        usual = SamplingParams()
        for index, prompt in enumerate(prompts):
            params = sampling_params[index] if isinstance(sampling_params, Sequence) else sampling_params
            params = usual if params is None else params
            if id(params) not in checked:
                checked[id(params)] = _checked({"prompt": "", **params.body()}, OfflineFields)
            fields = checked[id(params)]
            if prompt.cache_salt is not None:
                fields = fields.model_copy(update={"cache_salt": prompt.cache_salt})
            yield Job(f"offline-{next(self._numbers)}", f"prompts[{index}]", prompt, fields)


def _checked(body: Mapping[str, object], schema: type[Fields]) -> Fields:
    """Return fields that are as in the HTTP API. Raises `InvalidRequestError`, which names the wrong one."""
    with invalid_requests():
        return check(dict(body), schema)
