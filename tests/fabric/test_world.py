"""Processes are counted by rank, and those of a host by their place on it."""

from loong.fabric.world import World

ONE_HOST = World(4, 2)
TWO_HOSTS = World(5, 2, (0, 0, 1, 0, 1))


def test_processes_of_a_host_have_places_that_begin_at_zero() -> None:
    assert [ONE_HOST.index_on_host(rank) for rank in range(8)] == list(range(8))
    by_host: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(TWO_HOSTS.size):
        host_id = TWO_HOSTS.host_ids[TWO_HOSTS.instance_id(rank)]
        by_host[host_id].append(TWO_HOSTS.index_on_host(rank))
        assert TWO_HOSTS.num_on_host(rank) == (6, 4)[host_id]
    assert by_host == {0: list(range(6)), 1: list(range(4))}


def test_instances_are_on_one_host_if_all_are() -> None:
    assert ONE_HOST.is_one_host(range(4))
    assert TWO_HOSTS.is_one_host((0, 1, 3))
    assert not TWO_HOSTS.is_one_host((0, 1, 2))
    assert World(2, 1, (0, 1)).has_neighbors(0) is World(1, 2).has_neighbors(0) is False
    assert TWO_HOSTS.has_neighbors(9)


def test_tensors_travel_between_equal_ranks_and_within_an_instance() -> None:
    world = World(2, 2, (0, 1))
    pairs = [(a, b) for a in range(4) for b in range(a) if world.exchange_tensors(a, b)]
    assert pairs == [(1, 0), (2, 0), (3, 1), (3, 2)]
