from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.request import RequestShape, TokenRun


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
