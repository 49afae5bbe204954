import math
from dataclasses import fields, replace
from typing import Any

import pytest

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar, GrammarKind
from loong.core.limits import MAX_CHOICES, MAX_PRIORITY
from loong.core.placement import Placement, striped
from loong.core.request import SLO, FinishReason, NewRequest, Request, RequestView, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("max_tokens", 0, "1 to 2147483647, but is 0"),
        ("max_tokens", 2**31, "1 to 2147483647, but is 2147483648"),
        ("max_tokens", -(10**400), "but is about -1e400"),
        ("min_tokens", 17, "0 to 16"),
        ("min_tokens", -1, "0 to 2147483647"),
        ("temperature", -0.5, "0 to 100"),
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "inf"),
        ("top_p", 0.0, "1e-09 to 1"),
        ("top_p", 1.5, "1.5"),
        ("top_k", 0, "1 to 2147483647"),
        ("top_k", 2**64, "but is about 1e19"),
        ("top_k", math.nan, "nan"),
        ("min_p", -0.1, "0 to 1"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -3.0, "-2 to 2"),
        ("repetition_penalty", 0.0, "1e-09 to 100"),
        ("seed", -1, "0 to 9223372036854775807, but is -1"),
        ("seed", 2**63, "but is 9223372036854775808"),
        ("num_logprobs", 21, "0 to 20"),
        ("logit_bias", ((1, 5.0), (2, math.nan)), "-100 to 100, but is nan"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name_and_the_bounds(
    name: str, value: object, shown: str
) -> None:
    with pytest.raises(InvalidRequestError, match=shown) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # the names differ in type
    assert caught.value.param == name.removeprefix("num_")


def test_the_bounds_themselves_are_taken() -> None:
    params = SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_p=1, top_k=1, seed=2**63 - 1, num_logprobs=20
    )
    assert not params.has_penalties


DRAWN: dict[str, Any] = {  # what a captured step of a lease draws by, and what ends a request
    "max_tokens": 9,
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 5,
    "stop_token_ids": (1,),
}
MORE: dict[str, Any] = {
    "min_tokens": 1,
    "num_logprobs": 0,
    "logit_bias": ((3, 1.0),),
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "grammar": Grammar(GrammarKind.REGEX, "a"),
    "allowed_token_ids": (3,),
    "bad_words": ((3,),),
}


def test_a_request_is_plain_unless_it_asks_for_more_than_a_draw() -> None:
    assert SamplingParams(**DRAWN).is_plain
    assert [name for name, value in MORE.items() if SamplingParams(**DRAWN, **{name: value}).is_plain] == []


def test_leases_know_every_field_of_a_request() -> None:
    assert {field.name for field in fields(SamplingParams)} == DRAWN.keys() | MORE.keys()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=-0.1),
        SamplingParams(repetition_penalty=1.1),
    ],
)
def test_each_penalty_needs_the_tokens_so_far(params: SamplingParams) -> None:
    assert params.has_penalties


@pytest.mark.parametrize(
    ("num_output_tokens", "token_id", "expected"),
    [
        (1, 5, None),
        (1, 7, None),  # a stop token that min_tokens forbids
        (2, 7, None),
        (3, 7, FinishReason.STOP),
        (3, 5, None),
        (4, 5, FinishReason.LENGTH),
        (4, 7, FinishReason.STOP),  # a stop at the very last token is a stop
    ],
)
def test_a_request_ends_at_a_stop_token_or_at_its_length(
    num_output_tokens: int, token_id: int, expected: FinishReason | None
) -> None:
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(7,))
    assert params.finish_reason(num_output_tokens, token_id) is expected


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one token") as caught:
        Request("r", (), SamplingParams(), arrival_time=0.0)
    assert caught.value.param == "prompt"


def test_a_request_arrives_with_all_that_its_client_gave() -> None:
    params = SamplingParams(seed=3)
    given = ("r", (1, 2), params, SLO(1.0, 0.1), "me", 2, -1, 5)
    assert NewRequest(*given).arriving(7.0) == Request(*given, arrival_time=7.0)


def test_a_view_counts_what_is_known_computed_and_left() -> None:
    view = RequestView("r", 10, 3, 8, 0.0, None, striped("r", range(12), (0, 1)))
    assert (view.num_known_tokens, view.num_computed_tokens) == (13, 12)
    assert (view.num_uncomputed_tokens, view.num_remaining_tokens) == (1, 5)
    assert view.is_decoding
    assert view.is_plannable


def test_a_lost_stripe_is_missing_with_all_that_was_never_computed() -> None:
    placement = striped("r", range(40), (0, 1, 2, 3)).without(1)
    view = RequestView("r", 38, 3, 8, 0.0, None, placement)
    assert view.missing == (range(1, 40, 4), range(40, 41))
    assert (view.has_holes, view.num_uncomputed_tokens, view.is_decoding) == (True, 11, False)
    assert placement.first_missing == 1


def test_what_was_never_computed_is_no_hole() -> None:
    view = RequestView("r", 10, 0, 8, 0.0, None, striped("r", range(6), (0, 1)))
    assert (view.has_holes, view.missing) == (False, (range(6, 10),))
    assert RequestView("r", 10, 0, 8, 0.0, None, Placement()).missing == (range(10),)


def test_a_request_whose_prompt_lacks_one_token_is_not_decoding() -> None:
    assert not RequestView("r", 10, 0, 8, 0.0, None, striped("r", range(9), (0,))).is_decoding


AT_REST = RequestView("r", 10, 0, 8, 0.0, None, striped("r", range(9), (0,)))


@pytest.mark.parametrize(
    "view",
    [replace(AT_REST, batch_id=3), replace(AT_REST, is_migrating=True), replace(AT_REST, has_ended=True)],
)
def test_a_request_in_flight_or_over_cannot_be_planned(view: RequestView) -> None:
    assert not view.is_plannable


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-7, 2e9, -math.inf, math.nan])
def test_targets_out_of_bounds_are_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"ttft must be from 1e-06 to 1e\+09, but is"):
        SLO(seconds, 1.0)
    with pytest.raises(InvalidRequestError, match=r"tpot must be from 1e-06 to 1e\+09, but is"):
        SLO(1.0, seconds)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**64])
def test_token_ids_that_no_model_has_are_refused_by_the_name_of_what_holds_them(token_id: int) -> None:
    for name, params in (
        ("stop_token_ids", SamplingParams(stop_token_ids=(3, token_id))),
        ("logit_bias", SamplingParams(logit_bias=((token_id, 1.0),))),
    ):
        with pytest.raises(
            InvalidRequestError, match=f"{name} holds token id .*from 0 to 2147483647"
        ) as caught:
            Request("r", (1,), params, arrival_time=0.0)
        assert caught.value.param == name


def test_choices_are_requests_whose_seeds_count_up() -> None:
    params = SamplingParams(seed=2**63 - 2, max_tokens=5)
    request = Request("r", (1, 2), params, SLO(1.0, 0.1), "me", arrival_time=3.0, num_choices=3)
    choices = request.choices()
    assert request.choice_ids == tuple(choice.request_id for choice in choices)
    assert [choice.request_id for choice in choices] == ["r", "r-1", "r-2"]
    assert [choice.sampling_params.seed for choice in choices] == [2**63 - 2, 2**63 - 1, 0]
    first = replace(request, num_choices=1)
    assert choices[0] == first
    assert first.choices() == (first,)
    for choice in choices:
        seeded = replace(choice.sampling_params, seed=params.seed)
        assert replace(choice, request_id="r", sampling_params=seeded) == first


@pytest.mark.parametrize("num_choices", [0, MAX_CHOICES + 1])
def test_more_choices_than_there_may_be_are_refused(num_choices: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"n must be from 1 to 16, but is {num_choices}"):
        Request("r", (1,), SamplingParams(), arrival_time=0.0, num_choices=num_choices)


@pytest.mark.parametrize("priority", [-MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_a_priority_out_of_bounds_is_refused_with_the_bounds(priority: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"from {-MAX_PRIORITY} to {MAX_PRIORITY}, but is {priority}"
    ):
        Request("r", (1,), SamplingParams(), arrival_time=0.0, priority=priority)
