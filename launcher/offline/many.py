"""Many prompts at once: submitted in order, with a bound on those in flight, and shown by a bar."""

import asyncio
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from tqdm.auto import tqdm

from loong.core.errors import EngineStoppedError, LoongError
from loong.launcher.offline.answers import Answer, Job, answer_of
from loong.launcher.offline.engine_thread import EngineThread
from loong.launcher.offline.outputs import RequestOutput
from loong.server.context import Server

MAX_IN_FLIGHT = 2048  # prompts: more than a policy considers or any KV holds
_YIELD_EVERY = 16  # prompts, so that the engine goes on meanwhile

_Ended: TypeAlias = "SimpleQueue[tuple[int, Answer] | LoongError]"


def generate_many(engine: EngineThread, jobs: Sequence[Job], *, use_tqdm: bool) -> list[RequestOutput]:
    """Return the outputs of all prompts, in order. The first error, or an interrupt, ends all others."""
    ended: _Ended = SimpleQueue()
    outputs: dict[int, RequestOutput] = {}
    work = engine.call(lambda: _run(engine.server, jobs, ended))
    try:
        with _Progress(len(jobs), is_shown=use_tqdm) as progress:
            for _ in jobs:
                item = ended.get()
                if isinstance(item, LoongError):
                    raise item
                index, answer = item
                outputs[index] = answer.output()
                progress.add(outputs[index])
    finally:
        work.cancel()
    return [outputs[index] for index in range(len(jobs))]


async def _run(server: Server, jobs: Sequence[Job], ended: _Ended) -> None:
    """Submit all prompts, and put each answer that has ended, or the error that ends all."""
    answers: dict[int, Answer] = {}
    room = asyncio.Semaphore(MAX_IN_FLIGHT)

    def end(index: int, answer: Answer) -> None:
        del answers[index]
        room.release()
        ended.put((index, answer))

    try:
        for index, job in enumerate(jobs):
            await room.acquire()
            answers[index] = await answer_of(server, job, partial(end, index))
            answers[index].submit()
            if index % _YIELD_EVERY == 0:
                await asyncio.sleep(0)
        for _ in range(MAX_IN_FLIGHT):
            await room.acquire()
    except LoongError as error:
        ended.put(error)
    except asyncio.CancelledError:
        ended.put(EngineStoppedError())  # unless nobody waits any more
        raise
    finally:
        for answer in tuple(answers.values()):
            answer.abort()


class _Progress:
    """A bar of finished prompts, with the tokens a second of all that are finished."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Processed prompts", disable=not is_shown)
        self._num_input = self._num_output = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count a finished prompt."""
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = self._bar.format_dict["elapsed"]
        if seconds:
            speeds = self._num_input / seconds, self._num_output / seconds
            self._bar.set_postfix_str(
                f"input {speeds[0]:.0f} tokens/s, output {speeds[1]:.0f} tokens/s", refresh=False
            )
        self._bar.update()
