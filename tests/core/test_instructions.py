from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.placement import striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import Request, SamplingParams
from loong.state.live_request import LiveRequest


@given(st.integers(0, 3), st.data())
def test_workers_are_reported_that_a_request_decodes_just_when_policies_see_it(
    num_output_tokens: int, data: st.DataObject
) -> None:
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=9), arrival_time=0.0)
    num_known = 3 + num_output_tokens
    num_computed = data.draw(st.integers(0, num_known - 1))
    chunk = range(num_computed, data.draw(st.integers(num_computed + 1, num_known)))
    live = LiveRequest(request, striped("r", range(num_computed), (0,)), list(range(num_output_tokens)))
    batch = BatchPlan(ESPGroup((0,)), (QueryBlock("r", chunk, 0, Transfer.QUERY),), ())
    assert live.input_for(batch).is_decoding == live.view().is_decoding
