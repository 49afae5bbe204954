from collections.abc import Callable
from random import Random

import pytest
from chaos import any_plan

from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot


@pytest.fixture
def plan_at_random() -> Callable[[Random, Snapshot], IterationPlan]:
    return any_plan
