"""What a worker tells of its own end."""

from pathlib import Path

import pytest
from families import write_tiny_model

from loong.core.events import Event, InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import RunBatch
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.launcher.local import ClusterConfig, local_workers


async def test_a_worker_that_fails_says_why_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    of_nobody = BatchPlan(
        ESPGroup((0,)),
        (QueryBlock("nobody", range(3), 0, Transfer.KV),),
        (KVSegment("nobody", range(3), 0),),
    )
    async with local_workers(ClusterConfig(str(folder), num_instances=1, kv_capacity=64)) as executor:
        executor.submit([RunBatch(1, of_nobody, ())])
        events: list[Event] = []
        while not (losses := [event for event in events if isinstance(event, InstanceLost)]):
            events += await executor.next_events()
    event = losses[0]
    assert (event.instance_id, event.reason) == (0, "KeyError: 'nobody'")
    told = capfd.readouterr().err
    assert told.count("Traceback") == 1, told
