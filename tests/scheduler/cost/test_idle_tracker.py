from loong.scheduler.cost.idle_tracker import IdleTracker

IDLE_SECONDS = 0.5


def test_who_has_just_worked_has_not_rested_and_who_has_not_for_long_has() -> None:
    idle_tracker = IdleTracker(IDLE_SECONDS)
    idle_tracker.work((0, 1), until=5.0)
    assert not idle_tracker.were_idle((0,), now=5.0 + IDLE_SECONDS / 2)
    assert idle_tracker.were_idle((0,), now=5.0 + 2 * IDLE_SECONDS)


def test_a_group_has_rested_if_one_of_its_instances_has() -> None:
    idle_tracker = IdleTracker(IDLE_SECONDS)
    idle_tracker.work((0, 1), until=1.0)
    idle_tracker.work((1,), until=2.0)
    assert not idle_tracker.were_idle((1,), now=2.0)
    assert idle_tracker.were_idle((1, 0), now=2.0)


def test_instances_rest_from_the_beginning() -> None:
    assert not IdleTracker(IDLE_SECONDS).were_idle((0,), now=0.0)
    assert IdleTracker(IDLE_SECONDS).were_idle((0,), now=1.0)
