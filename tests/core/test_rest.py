from loong.core.rest import REST, Rests


def test_who_has_just_worked_has_not_rested_and_who_has_not_for_long_has() -> None:
    rests = Rests()
    rests.work((0, 1), until=5.0)
    assert not rests.have_rested((0,), now=5.0 + REST / 2)
    assert rests.have_rested((0,), now=5.0 + 2 * REST)


def test_a_group_has_rested_if_one_of_its_instances_has() -> None:
    rests = Rests()
    rests.work((0, 1), until=1.0)
    rests.work((1,), until=2.0)
    assert not rests.have_rested((1,), now=2.0)
    assert rests.have_rested((1, 0), now=2.0)


def test_instances_rest_from_the_beginning() -> None:
    assert not Rests().have_rested((0,), now=0.0)
    assert Rests().have_rested((0,), now=1.0)
