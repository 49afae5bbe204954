from collections import defaultdict

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from loong.core.attention_tasks import attention_tasks, num_retained_tokens
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement, striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import dealt, first_of

laws = examples(25, thorough=400)
NUM_INSTANCES = 4


@st.composite
def histories(draw: st.DrawFn, request_id: str) -> Placement:
    """Return KV of some of the first positions of a request, anywhere."""
    homes = draw(st.lists(st.none() | st.integers(0, NUM_INSTANCES - 1), max_size=20))
    return Placement().adding(
        KVSegment(request_id, range(p, p + 1), home) for p, home in enumerate(homes) if home is not None
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[BatchPlan, dict[str, Placement]]:
    """Return one step for some requests, each with its own history, chunk and way of travelling."""
    group = ESPGroup(tuple(draw(st.permutations(range(NUM_INSTANCES)))))
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    placements = {}
    for request_id in draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")])):
        history = placements[request_id] = draw(histories(request_id))
        masters = draw(st.permutations(group.instance_ids))[: draw(st.integers(1, NUM_INSTANCES))]
        transfer = draw(st.sampled_from(Transfer))
        missing = (*history.holes, range(history.stop, history.stop + 12))
        chunk = first_of(missing, draw(st.integers(1, 12)))
        stripes = dealt(chunk, len(masters))
        for master, positions in [(m, p) for m, pieces in zip(masters, stripes, strict=True) for p in pieces]:
            queries.append(QueryBlock(request_id, positions, master, transfer))
            keeper = master if transfer is Transfer.QUERY else draw(st.sampled_from(group.instance_ids))
            writes.append(KVSegment(request_id, positions, keeper))
    return BatchPlan(group, tuple(draw(st.permutations(queries))), tuple(writes)), placements


@laws
@given(steps())
def test_every_query_meets_every_earlier_position_and_itself_once(
    step: tuple[BatchPlan, dict[str, Placement]],
) -> None:
    batch, placements = step
    seen: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for task in attention_tasks(batch, placements):
        for query in task.block.positions:
            keys = [key for key in task.segment.positions if key <= query]
            seen[task.block.request_id, query] += keys
    assert {key: sorted(keys) for key, keys in seen.items()} == {
        (block.request_id, query): list(range(query + 1))
        for block in batch.queries
        for query in block.positions
    }


@laws
@given(steps(), st.integers(1, 24))
def test_with_a_window_tasks_without_a_key_in_it_are_left_out(
    step: tuple[BatchPlan, dict[str, Placement]], window: int
) -> None:
    all_tasks, tasks = list(attention_tasks(*step)), list(attention_tasks(*step, window))
    assert [task for task in all_tasks if task in tasks] == tasks
    for task in all_tasks:
        pairs = [(q, k) for q in task.block.positions for k in task.segment.positions]
        assert task in tasks or not any(q - window < k <= q for q, k in pairs)


@laws
@given(steps())
def test_attention_is_done_where_queries_and_kv_meet(step: tuple[BatchPlan, dict[str, Placement]]) -> None:
    batch, placements = step
    for task in attention_tasks(batch, placements):
        travels = task.block.transfer is Transfer.KV
        assert task.instance_id == (task.block.master_id if travels else task.segment.instance_id)
        assert task.segment.owner_id == task.block.request_id


@laws
@given(steps())
def test_retained_tokens_are_those_kept_away_from_their_master(
    step: tuple[BatchPlan, dict[str, Placement]],
) -> None:
    batch, _ = step
    made = {(b.request_id, p): b.master_id for b in batch.queries for p in b.positions}
    kept = {(s.owner_id, p): s.instance_id for s in batch.writes for p in s.positions}
    assert num_retained_tokens(batch) == sum(made[key] != kept[key] for key in made)


def test_a_striped_prefill_on_one_instance_of_its_own_is_one_task() -> None:
    (segment,) = striped("a", range(10), (2,)).segments
    block = QueryBlock("a", range(10), 2, Transfer.KV)
    (task,) = attention_tasks(BatchPlan(ESPGroup((2,)), (block,), (segment,)), {"a": Placement()})
    assert (task.block, task.segment, task.instance_id) == (block, segment, 2)
