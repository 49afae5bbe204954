import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.request import AnswerRun, RequestShape, TokenRun, Turn, WorkloadRequest


@given(seed=st.integers(0, 2**63), sizes=st.tuples(st.integers(1, 500), st.integers(1, 500)))
def test_of_two_runs_with_one_seed_the_shorter_is_a_prefix(seed: int, sizes: tuple[int, int]) -> None:
    short, long = sorted(sizes)
    assert TokenRun(seed, long).token_ids(321)[:short] == TokenRun(seed, short).token_ids(321)


@given(vocab_size=st.integers(1, 200_000))
def test_token_ids_are_in_the_vocabulary(vocab_size: int) -> None:
    assert all(0 <= token_id < vocab_size for token_id in TokenRun(1, 64).token_ids(vocab_size))


def test_a_scale_keeps_what_is_shorter_than_the_least_that_can_be_measured() -> None:
    shape = RequestShape((TokenRun(1, 3), TokenRun(2, 640)), 1, "someone")
    assert shape.scaled(1.0) == shape
    assert shape.scaled(1 / 64) == RequestShape((TokenRun(1, 3), TokenRun(2, 10)), 1, "someone")


def test_other_seeds_are_other_tokens_shared_as_before() -> None:
    first, second = (RequestShape((TokenRun(1, 64), TokenRun(seed, 8)), 2).reseeded(10) for seed in (2, 3))
    assert first.prompt[0] == second.prompt[0] == TokenRun(11, 64)
    assert first.prompt[1] != second.prompt[1]


def second_turn() -> RequestShape:
    first = RequestShape((TokenRun(1, 640), TokenRun(2, 64)), 320, turn=Turn(5, 0, 2))
    return RequestShape((TokenRun(3, 128),), 64, turn=Turn(5, 1, 2, 1.5)).after(first, 320)


def test_a_later_turn_begins_with_the_turn_before_and_its_answer() -> None:
    turn = second_turn()
    assert turn.prompt == (TokenRun(1, 640), TokenRun(2, 64), AnswerRun(320), TokenRun(3, 128))
    assert turn.new_runs == (TokenRun(3, 128),)
    assert (turn.is_follower, turn.is_followed, turn.think_time) == (True, False, 1.5)
    request = WorkloadRequest(0.0, turn)
    assert request.num_prompt_tokens == 640 + 64 + 320 + 128
    with pytest.raises(
        ValueError, match=r"number=1, .* follows a turn whose prompt and answer are not given"
    ):
        request.prompt_token_ids(99)
    assert request.prompt_token_ids(99, [7, 8]) == [7, 8, *TokenRun(3, 128).token_ids(99)]


def test_an_answer_in_a_prompt_is_scaled_as_the_answer_itself() -> None:
    turn = second_turn()
    assert [run.num_tokens for run in turn.scaled(1 / 64).prompt] == [10, 4, 16, 4]
    assert [run.num_tokens for run in turn.scaled(1 / 64, 1 / 64).prompt] == [10, 4, 5, 4]


def test_a_turn_alone_has_random_tokens_for_answers_and_no_session() -> None:
    alone, again = second_turn().alone(), second_turn().alone()
    assert alone == again
    assert alone.turn is None
    assert alone.new_runs == alone.prompt
    assert [run.num_tokens for run in alone.prompt] == [640, 64, 320, 128]
    lone = RequestShape((TokenRun(1, 3),), 2)
    assert lone.alone() == lone


def test_other_seeds_keep_the_session() -> None:
    turn = second_turn().reseeded(10)
    assert turn.prompt == (TokenRun(11, 640), TokenRun(12, 64), AnswerRun(320), TokenRun(13, 128))
    assert turn.turn == second_turn().turn
