from itertools import islice

import numpy as np

from loong.workloads.distributions.system_prompts import QUESTIONS_A_TASK, MMLULike, SystemPrompt
from loong.workloads.request import RequestShape, TokenRun


def runs_of(shape: RequestShape) -> tuple[TokenRun, ...]:
    assert all(isinstance(run, TokenRun) for run in shape.prompt)
    return shape.prompt  # type: ignore[return-value]  # just checked


def test_all_chats_have_the_same_system_prompt_and_nothing_else_in_common() -> None:
    shapes = list(islice(SystemPrompt(700).shapes(np.random.SeedSequence(1)), 400))
    assert {runs_of(shape)[0] for shape in shapes} == {runs_of(shapes[0])[0]}
    assert runs_of(shapes[0])[0].num_tokens == 700
    assert len({runs_of(shape)[1].seed for shape in shapes}) == 400
    fixed = next(SystemPrompt(64, 128, 256).shapes(np.random.SeedSequence(1)))
    assert (runs_of(fixed)[1].num_tokens, fixed.num_output_tokens) == (128, 256)


def test_questions_of_a_task_share_its_shots() -> None:
    by_shots = {
        shots: list(islice(MMLULike(shots).shapes(np.random.SeedSequence(2)), 2 * QUESTIONS_A_TASK))
        for shots in (1, 5)
    }
    for shots, shapes in by_shots.items():
        tasks = [runs_of(shape)[0] for shape in shapes]
        assert len(set(tasks[:QUESTIONS_A_TASK])) == len(set(tasks[QUESTIONS_A_TASK:])) == 1
        assert all(379 * shots // 5 <= task.num_tokens <= 2_895 * shots // 5 for task in tasks)
        assert all(55 <= runs_of(shape)[1].num_tokens <= 1_219 for shape in shapes)
    longest = [runs_of(shape)[0].num_tokens for shape in by_shots[5]]
    assert [tokens // 5 for tokens in longest] == [runs_of(shape)[0].num_tokens for shape in by_shots[1]]
    assert len(runs_of(next(MMLULike(0).shapes(np.random.SeedSequence(2))))) == 1
