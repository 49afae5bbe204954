"""Sessions of several turns: agents that call tools, and chats of people."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from loong.workloads.distributions import lengths
from loong.workloads.distributions.fits import chat_outputs, chat_prompts
from loong.workloads.request import AnswerRun, PromptRun, RequestShape, TokenRun, Turn
from loong.workloads.source import new_seed

AGENT_SYSTEM_TOKENS = 4_000  # instructions and definitions of tools, the same in all sessions
CHAT_MEAN_TURNS, MOST_CHAT_TURNS = 3.5, 40

Session: TypeAlias = Callable[[np.random.Generator], Iterator[RequestShape]]


def agents(seed: np.random.SeedSequence) -> Iterator[RequestShape]:
    """Return sessions of agents, without end.

    Published traces of agents have a median of 33 turns and 80,000 tokens of context by turn 30. They have
    131 tokens in for one out, and 94 % of the input was in the session before. Log-normal fits have these
    moments where the results of tools grow in proportion to the turn. Tools take 1.5 s in the median, our
    choice.
    """
    [prompt_seed] = seed.spawn(1)
    system = TokenRun(new_seed(np.random.default_rng(prompt_seed)), AGENT_SYSTEM_TOKENS)
    return _without_end(lambda rng: _agent(rng, system), seed)


def chats(seed: np.random.SeedSequence) -> Iterator[RequestShape]:
    """Return chats of several turns, without end.

    Each turn has a message and an answer with the lengths of `sharegpt`. There are 3.5 turns in the mean,
    geometrically distributed, and people take 10 s in the median to read and write: our choices.
    """
    return _without_end(_chat, seed)


def _without_end(session: Session, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
    """Yield the turns of sessions, each from its own random stream."""
    while True:
        [session_seed] = seed.spawn(1)
        yield from session(np.random.default_rng(session_seed))


def _agent(rng: np.random.Generator, system: TokenRun) -> Iterator[RequestShape]:
    [num_turns] = lengths.log_normal(rng, 1, median=33, sigma=0.35, low=5, high=100).tolist()
    [task] = lengths.log_normal(rng, 1, median=1_000, sigma=1.0, low=50, high=8_000).tolist()
    [in_all] = lengths.log_normal(rng, 1, median=110_000, sigma=0.25, low=40_000, high=200_000).tolist()
    outputs = lengths.log_normal(rng, num_turns, median=250, sigma=1.0, low=2, high=4_000)
    shares = np.arange(1, num_turns) * rng.lognormal(0.0, 1.0, num_turns - 1)
    results = np.maximum(np.rint(in_all * shares / shares.sum()).astype(np.int64), 1)
    times = rng.lognormal(np.log(1.5), 1.0, num_turns - 1)
    return _turns(rng, (system,), [task, *results.tolist()], outputs.tolist(), times.tolist())


def _chat(rng: np.random.Generator) -> Iterator[RequestShape]:
    num_turns = min(int(rng.geometric(1 / CHAT_MEAN_TURNS)), MOST_CHAT_TURNS)
    messages, outputs = chat_prompts(rng, num_turns), chat_outputs(rng, num_turns)
    times = rng.lognormal(np.log(10.0), 0.8, num_turns - 1)
    return _turns(rng, (), messages.tolist(), outputs.tolist(), times.tolist())


def _turns(
    rng: np.random.Generator,
    beginning: tuple[PromptRun, ...],
    new: Sequence[int],
    outputs: Sequence[int],
    think_times: Sequence[float],
) -> Iterator[RequestShape]:
    """Yield the turns of a session: `new` tokens and `outputs` of each, and the times between them."""
    session_id, prompt = new_seed(rng), beginning
    for number, (num_new, num_output) in enumerate(zip(new, outputs, strict=True)):
        turn = Turn(session_id, number, len(new), think_times[number - 1] if number else 0.0)
        prompt = (*prompt, TokenRun(new_seed(rng), num_new))
        yield RequestShape(prompt, num_output, turn=turn)
        prompt = (*prompt, AnswerRun(num_output))
