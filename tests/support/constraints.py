"""The grammars of a worker, with real processes, which end with the process that made them."""

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from loong.grammar.mask_process import SharedMasks, fork_mask_process
from loong.worker.sampling.grammar_constraints import MAX_BYTES, Constraints
from loong.worker.sampling.mask_processes import MaskProcesses

Broadcast: TypeAlias = Callable[[Tensor], Tensor]


def constraints_of(
    tokenizer: Path | None, vocab_size: int, max_bytes: int = MAX_BYTES, broadcast: Broadcast | None = None
) -> Constraints:
    """Return the grammars over the tokens of a folder; None stands for a worker without a tokenizer."""
    masks = None if tokenizer is None else mask_processes(tokenizer, vocab_size)
    return Constraints(masks, vocab_size, max_bytes, broadcast)


def mask_processes(tokenizer: Path, vocab_size: int) -> MaskProcesses:
    """Return new processes over the tokens of a folder."""
    shared = SharedMasks(vocab_size)
    masks = MaskProcesses(fork_mask_process(tokenizer, vocab_size, shared), shared)
    atexit.register(masks.close)
    return masks
