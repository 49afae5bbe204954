"""The seconds of a batch: those in which its instance computed it, however early it was sent."""

from pathlib import Path
from queue import SimpleQueue

import pytest
from bare_instance import BareInstance
from families import write_tiny_model
from plans import prefill
from requests_for_tests import greedy_request, random_prompt
from torch import Tensor

from loong.core.instructions import RunBatch
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.messages.wire import BatchBegun, BatchDone, BatchFailed, ForgetFailures, PromptScored, StepDone
from loong.model.device import CpuDevice
from loong.state.live_request import LiveRequest
from loong.worker import batch_loop
from loong.worker.backend import CpuBackend
from loong.worker.batch_loop import BatchLoop
from loong.worker.batches.lease_ends import LeaseEnds


class CountingDevice(CpuDevice):
    """A processor whose clock has advanced by one for each row of a product."""

    now = 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.now += len(x)
        return super().linear(x, weight, bias)


class Instance(BareInstance):
    """One instance that gets all batches at once. `reports` is what it sent."""

    def __init__(self, folder: Path, fabric: SocketFabric, device: CountingDevice) -> None:
        backend = CpuBackend()
        backend.device = device
        super().__init__(fabric, 0, folder, None, backend)
        self.reports: list[BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed] = []

    def carry_out_all(self, commands: list[RunBatch]) -> list[BatchDone]:
        """Return the ends of all batches."""
        loop = BatchLoop(
            0, 0, self._runner, LeaseEnds(1.0), lambda *sent: self.reports.extend(sent), lambda: None
        )
        queue: SimpleQueue[RunBatch | ForgetFailures | None] = SimpleQueue()
        for command in commands:
            queue.put(command)
        for _ in commands:
            loop.turn(queue)
        queue.put(None)
        loop.turn(queue)
        return [report for report in self.reports if isinstance(report, BatchDone)]


def test_batches_that_are_sent_together_have_each_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CountingDevice()
    fabric = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    instance = Instance(write_tiny_model("llama", tmp_path / "model"), fabric, device)
    monkeypatch.setattr(batch_loop, "monotonic", lambda: device.now)
    commands = []
    for number, length in enumerate((20, 40, 60), start=1):
        live = LiveRequest(greedy_request(random_prompt(length, seed=number), 3))
        plan = prefill([live.view()], (0,))
        commands.append(RunBatch(number, plan, (live.input_for(plan),)))
    ends = instance.carry_out_all(commands)
    fabric.close()
    seconds = [end.ended_at - end.began_at for end in ends]
    assert seconds[1] - seconds[0] == pytest.approx(seconds[2] - seconds[1])
    assert 1.5 < seconds[1] / seconds[0] < 2.5
    assert [end.began_at for end in ends[1:]] == [end.ended_at for end in ends[:-1]]
    kinds = [(type(report).__name__, report.batch_id) for report in instance.reports]
    assert kinds == [(kind, n) for n in (1, 2, 3) for kind in ("BatchBegun", "StepDone", "BatchDone")]
