from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from loong.core.errors import ConfigError
from loong.workloads.data_file import DataFile
from loong.workloads.datasets.saved import save_requests
from loong.workloads.distributions.laws import Fixed, Uniform
from loong.workloads.distributions.mix import Mix
from loong.workloads.workload import make_workload


def test_each_source_has_its_share() -> None:
    requests = make_workload("3*fixed(10)+fixed(20)", 6_000, seed=1)
    share = np.mean([request.num_prompt_tokens == 10 for request in requests])
    assert share == pytest.approx(0.75, abs=0.02)


def test_the_requests_of_a_source_are_in_its_own_order() -> None:
    source = Uniform(1, 1_000)
    mix = Mix(((1.0, source), (1.0, Fixed(2_000))))
    ours = [s for s in islice(mix.shapes(np.random.SeedSequence(3)), 200) if s.prompt[0].num_tokens < 2_000]
    _, source_seed, _ = np.random.SeedSequence(3).spawn(3)
    assert ours == list(islice(source.shapes(source_seed), len(ours)))


def test_a_mix_ends_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    save_requests(file, make_workload("fixed(10)", 3, seed=0))
    mix = Mix(((1.0, DataFile(str(file))), (1.0, Fixed(20))))
    sizes = [shape.prompt[0].num_tokens for shape in mix.shapes(np.random.SeedSequence(3))]
    assert sizes.count(10) == 3


def test_a_mix_of_one_or_of_no_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least two"):
        Mix(((1.0, Fixed(1)),))
    with pytest.raises(ConfigError, match=r"weight 0 of fixed\(1\)"):
        Mix(((0.0, Fixed(1)), (1.0, Fixed(2))))
