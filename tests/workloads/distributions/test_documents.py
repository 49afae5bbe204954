from itertools import groupby

import pytest

from loong.workloads.workload import make_workload


def test_four_questions_a_document_are_what_leval_has() -> None:
    assert make_workload("leval(4)", 20, seed=3) == make_workload("leval", 20, seed=3)


@pytest.mark.parametrize("questions", [1, 7, 400])
def test_each_document_has_its_number_of_questions(questions: int) -> None:
    drawn = make_workload(f"leval({questions})", 3 * questions + 900 // questions * questions, seed=1)
    runs = [len(list(group)) for _, group in groupby(drawn, lambda request: request.shape.prompt[0])]
    assert set(runs) == {questions}
    assert len({request.shape.new_runs[1].seed for request in drawn}) == len(drawn)
