from collections import Counter
from itertools import islice

import numpy as np

from loong.workloads.distributions.shared_prefix import SharedPrefix
from loong.workloads.request import RequestShape


def drawn(source: SharedPrefix, number: int = 2_000) -> list[RequestShape]:
    return list(islice(source.shapes(np.random.SeedSequence(1)), number))


def test_lengths_keep_to_relay_attentions_ranges_and_reach_both_ends() -> None:
    shapes = drawn(SharedPrefix())
    system, private = ({shape.prompt[part].num_tokens for shape in shapes} for part in (0, 1))
    assert system == {64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768}
    assert (min(private), max(private)) == (128, 1_024)
    assert (min(s.num_output_tokens for s in shapes), max(s.num_output_tokens for s in shapes)) == (128, 512)


def test_a_user_has_one_system_prompt_however_many_requests_it_sends() -> None:
    shapes = drawn(SharedPrefix())
    assert len({(shape.user, shape.prompt[0]) for shape in shapes}) == 10
    assert len({shape.new_runs[1].seed for shape in shapes}) == len(shapes)
    counts = Counter(shape.user for shape in shapes)
    assert set(counts) == {f"user-{number}" for number in range(10)}
    assert all(150 < count < 250 for count in counts.values())


def test_with_a_number_all_users_have_system_prompts_of_this_length() -> None:
    shapes = drawn(SharedPrefix(2_048))
    assert {shape.prompt[0].num_tokens for shape in shapes} == {2_048}
    assert len({shape.new_runs[0].seed for shape in shapes}) == 10
