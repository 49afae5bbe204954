from hypothesis import given
from hypothesis import strategies as st

from loong.attention.rotated import slices_of


@given(st.integers(1, 8), st.integers(2, 5))
def test_each_member_takes_every_slice_of_its_turns_and_each_micro_batch_goes_on_to_the_next(
    num_layers: int, dop: int
) -> None:
    slices = list(slices_of(num_layers, dop))
    assert {(one.part, one.index) for one in slices} == {
        (part, index) for part in range(dop + 1) for index in range(num_layers + 1)
    }
    assert len(slices) == (dop + 1) * (num_layers + 1)
    for turn, one in enumerate(slices):
        assert one.member == turn % dop
    for one, following in zip(slices, slices[dop + 1 :], strict=False):
        assert (following.part, following.index) == (one.part, one.index + 1)
        assert following.member == (one.member + 1) % dop
