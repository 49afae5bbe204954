"""Lists of layers with a window have the last positions of each query, in each step of any lease."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.positions import dealt
from loong.core.request import SamplingParams
from loong.model.device import CpuDevice
from loong.worker.kv.pool import KVPool
from loong.worker.steps.decode_state import DecodeRow, LeaseBatch, Whole
from loong.worker.steps.window_lists import WindowLists

NUM_STEPS = 6  # before the lease is lengthened, and as many after it


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(1, NUM_STEPS),
)
def test_each_step_lists_the_positions_of_its_windows_in_order(
    requests: list[tuple[int, int, bool]], window: int, longer_after: int
) -> None:
    """Of each request: its tokens, the stripes in which it has every other one here, and its master."""
    pool = KVPool(KVLayout(1, row_of_heads(1, 4), "float32", (window,)), 600, torch.device("cpu"))
    rows, peers, whole = [], [], {}
    for number, (num_tokens, num_stripes, is_own) in enumerate(requests):
        name, free = f"r{number}", range(num_tokens, num_tokens + NUM_STEPS)
        held = tuple(s for stripe in dealt((range(num_tokens),), 2 * num_stripes)[::2] for s in stripe)
        for positions in (*held, range(num_tokens, num_tokens + 2 * NUM_STEPS)):
            pool.allocate(name, positions)
        whole[name] = Whole(num_tokens, held)
        if is_own:
            rows.append(DecodeRow(0, num_tokens, (name, held), free, SamplingParams()))
        else:
            peers.append((name, held))
    batch = LeaseBatch(1, rows, {0: peers}, whole=whole)
    longer = [replace(row, free=range(row.free.start, row.free.stop + NUM_STEPS)) for row in rows]
    num_queries, own = 2 * batch.size, slice(batch.size, 2 * batch.size)
    lists = WindowLists(pool, window, num_queries, 200, CpuDevice())
    lists.begin(batch)
    for step in range(2 * NUM_STEPS):
        if step == longer_after:
            lists.lengthen(replace(batch, rows=longer))
        listed = lists.step(num_queries, own, torch.arange(batch.size) < len(rows))
        for name, query in batch.query_of().items():
            position, held = whole[name].position + step, whole[name].held
            seen = [p for positions in held for p in positions]
            if query >= batch.size:
                seen += range(whole[name].position, position + 1)
            wanted = [p for p in sorted(seen) if p > position - window]
            slots = torch.cat(
                [torch.empty(0, dtype=torch.int64), *(pool.slots(name, range(p, p + 1)) for p in wanted)]
            )
            assert torch.equal(listed.list_of(query), slots)
