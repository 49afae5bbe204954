"""The largest parts of the prefix cache."""

from shared_prefixes import PrefixCluster

from loong.engine.largest_prefixes import MIN_AGE, CachedPrefix, LargestPrefixes


def test_the_largest_parts_are_found_with_their_places_and_readers() -> None:
    cluster = PrefixCluster()
    largest = LargestPrefixes(cluster.state.owners)
    assert largest.at(0.0) == ()
    for name, tokens in (("a", range(9)), ("b", range(50, 70)), ("c", (*range(50, 60), *range(5)))):
        cluster.arrive(name, tuple(tokens))
        cluster.run_to_end(name)
    assert largest.at(MIN_AGE / 2) == ()
    cluster.arrive("d", (*range(50, 70), 1))
    cluster.begin("d")
    assert [(p.num_tokens, p.start, p.num_readers) for p in largest.at(MIN_AGE)] == [
        (20, 0, 1),
        (9, 0, 0),
        (5, 10, 0),
    ]
    assert largest.at(MIN_AGE)[0] == CachedPrefix("kv-2", 0, {0: 20}, 1)
