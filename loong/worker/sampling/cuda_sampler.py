"""Sampling on a GPU, by kernels that neither sort nor wait for the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loong.kernels import gpu
from loong.kernels.sampling.draw_params import DrawParams, Penalties
from loong.model.device import Device
from loong.worker.sampling.random_sampling import draw_params
from loong.worker.sampling.sampling_input import SamplingInput


class CudaSampler:
    """See Sampler."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspaces: dict[int, gpu.DrawWorkspace] = {}  # by rows; kept, since graphs hold their memory

    def upload(self, tensor: Tensor) -> Tensor:
        """See LogitsOps."""
        return self._device.upload(tensor)

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """See LogitsOps."""
        gpu.penalize(logits, penalties, out=logits)

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        params = draw_params(
            [item.params for item in inputs], [item.position for item in inputs], logits.shape[1]
        )
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        on_device = DrawParams(*map(self.upload, params))
        gpu.draw(
            logits.contiguous(), on_device, workspace=self.workspace(logits), tokens=tokens, largest=largest
        )
        return tokens, largest

    def workspace(self, logits: Tensor) -> gpu.DrawWorkspace:
        """Return the workspace to draw from logits [N, V]."""
        room = next((room for room in sorted(self._workspaces) if room >= len(logits)), None)
        if room is None:
            room = 1 << (len(logits) - 1).bit_length()
            workspace = gpu.DrawWorkspace.empty(room, logits.shape[1], logits.device)
            self._workspaces[room] = workspace
        return self._workspaces[room]
