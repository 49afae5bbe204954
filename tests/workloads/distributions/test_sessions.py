from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import mean, median

import pytest

from loong.workloads.metrics.prefix_hits import prefix_hits
from loong.workloads.request import AnswerRun, RequestShape
from loong.workloads.workload import make_workload


def shapes_of(text: str, number: int, seed: int = 0) -> list[RequestShape]:
    return [request.shape for request in make_workload(text, number, seed=seed)]


def sessions(shapes: Sequence[RequestShape]) -> list[list[RequestShape]]:
    """Return the turns of each session."""
    return [list(turns) for _, turns in groupby(shapes, lambda s: s.turn.session_id if s.turn else None)]


def num_prompt_tokens(shape: RequestShape) -> int:
    return sum(run.num_tokens for run in shape.prompt)


@pytest.mark.parametrize("text", ["agents", "chats", "0.5*chats+0.5*agents"])
@pytest.mark.parametrize("scale", [1.0, 1 / 64])
def test_a_turn_is_the_turn_before_its_answer_and_more(text: str, scale: float) -> None:
    drawn = [request.shape for request in make_workload(text, 300, seed=2, length_scale=scale)]
    for turns in sessions(drawn):
        numbers = [shape.turn.number for shape in turns if shape.turn is not None]
        assert numbers == list(range(len(turns)))
        for before, after in pairwise(turns):
            answered = (*before.prompt, AnswerRun(before.num_output_tokens))
            assert after.prompt == (*answered, *after.new_runs)
            assert after.new_runs
            assert after.think_time > 0


@pytest.mark.parametrize("seed", range(2))
def test_agents_have_the_published_moments(seed: int) -> None:
    drawn = shapes_of("agents", 12_000, seed)
    num_in = sum(map(num_prompt_tokens, drawn))
    whole = sessions(drawn)[:-1]
    assert median(len(turns) for turns in whole) == pytest.approx(33, abs=1)
    assert median(num_prompt_tokens(turns[29]) for turns in whole if len(turns) > 29) == pytest.approx(
        80_000, rel=0.05
    )
    assert num_in / sum(shape.num_output_tokens for shape in drawn) == pytest.approx(131, rel=0.05)
    assert sum(prefix_hits(drawn)) / num_in == pytest.approx(0.94, abs=0.005)


def test_agents_share_one_system_prompt() -> None:
    firsts = {turns[0].prompt[0] for turns in sessions(shapes_of("agents", 400))}
    assert len(firsts) == 1


def test_chats_have_the_lengths_of_sharegpt_in_each_turn() -> None:
    drawn = shapes_of("chats", 20_000)
    assert mean(len(turns) for turns in sessions(drawn)) == pytest.approx(3.5, rel=0.05)
    assert mean(sum(run.num_tokens for run in s.new_runs) for s in drawn) == pytest.approx(161, rel=0.05)
    assert mean(shape.num_output_tokens for shape in drawn) == pytest.approx(338, rel=0.05)


def test_in_a_mix_a_session_counts_as_one() -> None:
    drawn = shapes_of("1*agents+3*fixed(10)", 8_000)
    arrivals = [shape for shape in drawn if not shape.is_follower]
    assert mean(shape.turn is not None for shape in arrivals) == pytest.approx(0.25, abs=0.05)
