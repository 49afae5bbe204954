"""Managers whose messages are late, repeated or lost, and which are killed, keep each block once."""

from random import Random

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lending_world import World


class Managers(RuleBasedStateMachine):
    """Three engines with four instances, and a gManager."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World({0: (0,), 1: (1, 2), 2: (3,)})

    @rule(seed=st.integers(0, 2**32), num_moments=st.sampled_from([1, 20, 60]))
    def whatever_happens(self, seed: int, num_moments: int) -> None:
        random = Random(seed)
        for _ in range(num_moments):
            self.world.moment(random)
            self.world.check_owners()

    @rule(engine=st.integers(0, 2))
    def kill(self, engine: int) -> None:
        self.world.kill_engine(engine)

    @rule()
    def kill_global_manager(self) -> None:
        self.world.kill_global_manager()

    @rule()
    def settle(self) -> None:
        self.world.settle()
        self.world.check_settled()

    @invariant()
    def no_block_is_lost_or_has_two_owners(self) -> None:
        self.world.check_owners()

    def teardown(self) -> None:
        self.settle()
        self.world.check_owners()


TestManagers = Managers.TestCase
TestManagers.settings = settings(examples(20, thorough=300), stateful_step_count=10, deadline=None)
