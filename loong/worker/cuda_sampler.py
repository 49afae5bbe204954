"""Choosing tokens on a GPU, by kernels that neither sort nor wait for the host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loong.kernels import gpu
from loong.kernels.draw_params import DrawParams, Penalties
from loong.model.device import Device
from loong.worker.draw import draw_params
from loong.worker.sampling import SamplingInput, TokenIds


class CudaSampler:
    """See Sampler."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspaces: dict[int, gpu.DrawWorkspace] = {}  # by rows; kept, for graphs hold their memory

    def penalize(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> None:
        """See Sampler."""

        def column(value: Callable[[SamplingInput], float]) -> Tensor:
            return self._device.upload(torch.tensor([value(item) for item in inputs], dtype=torch.float32))

        prompts = self._counts(logits, [item.prompt_token_ids for item in inputs])
        penalties = Penalties(
            repetition=column(lambda item: item.params.repetition_penalty),
            frequency=column(lambda item: item.params.frequency_penalty),
            presence=column(lambda item: item.params.presence_penalty),
            is_in_prompt=prompts > 0,
            num_in_output=self._counts(logits, [item.output_token_ids for item in inputs]),
        )
        gpu.penalize(logits, penalties, out=logits)

    def choose(self, logits: Tensor, inputs: Sequence[SamplingInput]) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        params = draw_params(
            [item.params for item in inputs], [item.position for item in inputs], logits.shape[1]
        )
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        on_device = DrawParams(*map(self._device.upload, params))
        gpu.draw(
            logits.contiguous(), on_device, workspace=self.workspace(logits), tokens=tokens, largest=largest
        )
        return tokens, largest

    def workspace(self, logits: Tensor) -> gpu.DrawWorkspace:
        """Room to draw of logits [N, V]."""
        room = next((room for room in sorted(self._workspaces) if room >= len(logits)), None)
        if room is None:
            room = 1 << (len(logits) - 1).bit_length()
            workspace = gpu.DrawWorkspace.empty(room, logits.shape[1], logits.device)
            self._workspaces[room] = workspace
        return self._workspaces[room]

    def _counts(self, logits: Tensor, token_ids: Sequence[TokenIds]) -> Tensor:
        """How often each row has each token, [N, V] int32."""
        width = logits.shape[1]
        places = [row * width + torch.as_tensor(ids, dtype=torch.int64) for row, ids in enumerate(token_ids)]
        flat = self._device.upload(torch.cat(places))
        counts = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
        return counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).view_as(logits)
