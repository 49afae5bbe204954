"""The inputs of captured steps of prompts and decodes: memory allocated once, and filled for each step."""

from collections.abc import Mapping
from itertools import accumulate, pairwise

from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.local import tasks_of
from loong.attention.pool import PoolAttention
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.cost.work import WorkCount
from loong.core.errors import ConfigError
from loong.core.positions import coalesce
from loong.core.request import RequestId
from loong.worker.steps.attended_inputs import (
    MAX_DECODES,
    MAX_PROMPT_BLOCKS,
    MAX_ROUNDS,
    AttendedInputs,
    PromptKeys,
    is_decode,
)
from loong.worker.steps.step_inputs import StepInputs

MAX_ROWS = 2048  # of an instance in a step
GROUP_STEP_SIZES = (  # rows of a master in a step of a group
    *(16, 32, 64, 128, 256, 384, 512, 640, 768, 896),
    *(1024, 1152, 1280, 1536, 1792, MAX_ROWS),
)
_NUM_COLUMNS = 4


class MixedInputs:
    """Rows of a step, and what their queries attend in each kind of layers, in one piece of memory.

    `memory` is int64 [num_words(num_slots, limits, windows)]. Rows are the tokens of a step of which this
    instance is the master. Layers of a kind have the same window (`KVLayout.windows`).
    """

    def __init__(
        self, memory: Tensor, limits: CudaGraphLimits, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        """Divide `memory`. Raises `ConfigError` if it has no room for steps within the `limits`."""
        _check_room(limits)
        self._memory, self._limits = memory, limits
        num_rows = _NUM_COLUMNS * MAX_ROWS
        self.token_ids, self.positions, self.lengths, self.new_slots = memory[:num_rows].view(
            _NUM_COLUMNS, -1
        )
        size = (len(memory) - num_rows) // len(windows)
        self._starts = list(accumulate([num_rows] + [size] * len(windows)))
        self._attended = {
            window: AttendedInputs(memory[start:stop], limits, window)
            for window, (start, stop) in zip(windows, pairwise(self._starts), strict=True)
        }
        self._used = [0] * len(windows)  # words of each
        self._max_num_keys = min(its.max_num_keys for its in self._attended.values())

    @staticmethod
    def num_words(num_slots: int, limits: CudaGraphLimits, windows: tuple[int | None, ...] = (None,)) -> int:
        """Return the size of its memory, for a group with KV of `num_slots` tokens."""
        size = AttendedInputs.num_words(num_slots, limits)
        return _NUM_COLUMNS * MAX_ROWS + len(windows) * (size + size % 2)  # even, so that parts are aligned

    def prompt_keys(self, step: AttentionStep, num_rows: int) -> PromptKeys | None:
        """Return how all members attend in a step of up to `num_rows` rows a master; all find the same.

        None if it has no room on one of them, or is faster when launched by the host (`CudaGraphLimits`).
        """
        batch, count = step.batch, WorkCount(step.batch.group.instance_ids)
        steps = tuple(step.by_window().values())
        num_decodes = most_keys = 0
        for request_id in batch.request_ids:
            blocks = batch.blocks_of(request_id)
            most_keys += len(blocks) * (1 + max(block.positions[-1] for block in blocks))
            if is_decode(batch, blocks[0]):
                num_decodes += 1
                count.instances[blocks[0].master_id].num_tokens += 1  # its other counts are not needed
            elif all(_has_few_rounds(its, request_id) for its in steps):
                alone = step.placements[request_id].sharing(
                    ()
                )  # lists have room for all, if none is worth it
                count.add(blocks, batch.writes_of(request_id), alone)
            else:
                return None
        if most_keys > self._max_num_keys:
            return None
        works, limits = count.instances.values(), self._limits
        if num_decodes > MAX_DECODES or not all(map(limits.has, works)):
            return None
        if all(limits.has_few_keys(work, num_rows) for work in works):
            return PromptKeys.FEW
        if num_rows < limits.least_copied or all(map(limits.has_few_queries, works)):
            return PromptKeys.IN_POOL
        is_too_long = any(work.num_keys > limits.most_copied for work in works)
        return PromptKeys.IN_POOL if is_too_long else PromptKeys.MANY

    def ways(self, size: int) -> tuple[PromptKeys, ...]:
        """Return how steps of `size` rows may attend the keys of prompts, the usual way first."""
        return tuple(PromptKeys) if size >= self._limits.least_copied else (PromptKeys.IN_POOL,)

    def fill(self, step: AttentionStep, size: int, num_instances: int, inputs: StepInputs) -> bool:
        """Write a step, on the host, for a graph of this size and as many instances.

        Rows after it belong to no prompt or decode, and store nothing. Return whether requests read KV
        together.
        """
        self._memory[: _NUM_COLUMNS * MAX_ROWS].zero_()
        self.new_slots.fill_(-1)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.lengths[:num_rows] = inputs.lengths
        step.store.list_slots([(b.request_id, b.positions) for b in step.blocks], self.new_slots)
        filled = [
            self._attended[window].fill(its, size, num_instances) for window, its in step.by_window().items()
        ]
        self._used = [each.num_words for each in filled]
        return any(each.is_shared for each in filled)

    def copy_from(self, host: "MixedInputs") -> None:
        """Take the inputs of a step from the host."""
        first = 0
        for (start, stop), used in zip(pairwise(self._starts), host._used, strict=True):
            words = slice(first, start + used)
            self._memory[words].copy_(host._memory[words], non_blocking=True)
            first = stop

    def attention(
        self, size: int, num_instances: int, prompt_keys: PromptKeys, *, has_decodes: bool, is_shared: bool
    ) -> Mapping[int | None, PoolAttention]:
        """Return the attention of a step's queries here, by the window of layers.

        There may be decodes among them if it `has_decodes`; requests read KV together if it `is_shared`.
        """
        return {
            window: attended.attention(
                size,
                num_instances,
                prompt_keys,
                has_decodes=has_decodes,
                is_shared=is_shared and window is None,
            )
            for window, attended in self._attended.items()
        }


def _check_room(limits: CudaGraphLimits) -> None:
    """Raise `ConfigError` unless workers can capture steps within the `limits`."""
    for name, room in (("most_rows", MAX_ROWS), ("most_prompts", MAX_PROMPT_BLOCKS)):
        if (asked := getattr(limits, name)) > room:
            raise ConfigError(f"graph_limits.{name} is {asked}, but workers have room for {room}")


def _has_few_rounds(step: AttentionStep, request_id: RequestId) -> bool:
    """Return whether each block of a request takes no more tasks than there are rounds, on every instance."""
    for instance_id in step.batch.group.instance_ids if step.batch.group.dop > 1 else ():
        kv = step.kv_on(instance_id, request_id)
        if len(kv) <= MAX_ROUNDS or len(kv := coalesce(kv)) <= MAX_ROUNDS:
            continue
        if any(
            len(tasks_of(block, 0, 0, kv, step.window)) > MAX_ROUNDS
            for block in step.batch.blocks_of(request_id)
        ):
            return False
    return True
