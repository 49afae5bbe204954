"""Requests go where the least work is before their first token, so conversations stay at their engine."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from loong.server.engines.routing import (
    BLOCK_TOKENS,
    EngineLoad,
    RememberedPrefixes,
    blocks_of,
    chosen_engine,
)

tokens = st.lists(st.integers(0, 3), max_size=5 * BLOCK_TOKENS)
counts = st.integers(0, 500)


@st.composite
def loads(draw: st.DrawFn) -> list[EngineLoad]:
    num_engines = draw(st.integers(1, 5))
    return [EngineLoad(i, draw(counts), draw(counts), draw(counts), draw(counts)) for i in range(num_engines)]


@given(loads(), counts)
def test_no_other_engine_with_room_has_less_work_before_the_first_token(
    engines: Sequence[EngineLoad], num_final: int
) -> None:
    chosen = chosen_engine(engines, 500, num_final)
    roomy = [load for load in engines if load.max_request_kv >= num_final]
    assert not roomy or chosen in roomy
    for other in roomy:
        assert (
            chosen.num_outstanding - chosen.num_cached,
            -chosen.num_cached,
        ) <= (other.num_outstanding - other.num_cached, -other.num_cached)
    assert chosen_engine(engines[::-1], 500, num_final) == chosen


@given(loads(), counts)
def test_more_of_the_prompt_in_its_cache_never_makes_another_engine_the_choice(
    engines: Sequence[EngineLoad], more: int
) -> None:
    chosen = chosen_engine(engines, 1000, 0)
    others = [load for load in engines if load != chosen]
    warmer = EngineLoad(
        chosen.engine_id,
        chosen.num_outstanding,
        chosen.num_cached + more,
        chosen.num_remembered,
        chosen.max_request_kv,
    )
    assert chosen_engine([*others, warmer], 1000, 0) == warmer


@given(tokens, tokens, st.text(max_size=3), st.text(max_size=3))
def test_blocks_are_equal_as_far_as_salt_and_tokens_are(
    one: list[int], other: list[int], salt: str, other_salt: str
) -> None:
    found, others = blocks_of(salt, one), blocks_of(other_salt, other)
    assert len(found) == len(one) // BLOCK_TOKENS
    assert blocks_of(salt, one, found[: len(found) // 2]) == found
    for number, (a, b) in enumerate(zip(found, others, strict=False), 1):
        stop = number * BLOCK_TOKENS
        assert (a == b) == (salt == other_salt and one[:stop] == other[:stop])


@given(st.lists(tokens, max_size=8), st.integers(0, 4))
def test_what_is_remembered_is_bounded_and_begins_with_the_first_token(
    prompts: list[list[int]], max_blocks: int
) -> None:
    remembered = RememberedPrefixes(max_blocks * BLOCK_TOKENS)
    for prompt in prompts:
        blocks = blocks_of("", prompt)
        remembered.remember(blocks)
        assert remembered.num_tokens <= max_blocks * BLOCK_TOKENS
        assert remembered.num_cached(blocks) == min(len(blocks), max_blocks) * BLOCK_TOKENS
    remembered.forget()
    assert remembered.num_tokens == 0
