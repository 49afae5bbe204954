"""The choice of kernels of attention on GPUs."""

from enum import StrEnum


class AttentionKernels(StrEnum):
    """The libraries whose kernels attention may use. This project's own kernels take all other shapes.

    AUTO: FlashAttention-3 for tiles of prompts where it is installed and the GPU can run it, else cuDNN.
    LIGHTLLM: cuDNN for tiles of prompts, and LightLLM's kernel for decodes.
    """

    AUTO = "auto"
    TRITON = "triton"
    CUDNN = "cudnn"
    FA3 = "fa3"
    LIGHTLLM = "lightllm"
