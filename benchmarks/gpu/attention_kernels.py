"""Compares the libraries of `--attention-kernels` on one GPU, in bfloat16, with 32 and 8 heads of 128.

Prompts: a chunk of T new tokens behind S others, by this project's kernel alone, and with tiles of cuDNN and
of FlashAttention-3 (extra `fa3`). Ceiling: the rate of a large matrix product. Decodes: B requests of L
tokens, by this project's kernel and by LightLLM's (extra `lightllm`). Ceiling: the bandwidth of a large copy.
A library that is not installed has no column.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

import torch
from result import print_result, script_parser
from triton.testing import do_bench

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial
from loong.kernels.attend_task import AttendTask
from loong.kernels.attention import flash_attention3
from loong.kernels.slots import SlotLists
from loong.model.cuda_device import CudaDevice

CHUNKS = (
    *((1024, 0), (2048, 0), (8192, 0), (16384, 0)),
    *((2048, 8192), (2048, 32768), (512, 32768), (512, 131072), (2048, 131072)),
)
DECODES = ((1, 1000), (16, 1000), (128, 1500), (470, 1500), (16, 8192), (1, 131072))
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
GPU = torch.device("cuda", 0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=GPU)


def seconds(call: Callable[[], object]) -> float:
    milliseconds: float = do_bench(call, warmup=20, rep=100, return_mode="median")
    return milliseconds * 1e-3


def chunk_rate(kernels: AttentionKernels, num_new: int, num_before: int) -> float:
    """Return the TFLOP/s of a chunk's attention, counting the pairs that its mask has."""
    device = CudaDevice(0, torch.bfloat16, kernels=kernels)
    q, kv = random(num_new, NUM_HEADS, HEAD_DIM), random(num_before + num_new, 2, NUM_KV_HEADS, HEAD_DIM)
    new = range(num_before, num_before + num_new)
    table = device.table([AttendTask.causal(0, new, 0, range(len(kv)))])
    total = Partial.unseen(q, is_merged=table.is_merged)
    num_pairs = num_new * num_before + num_new * (num_new + 1) // 2
    taken = seconds(lambda: device.attend_blocks(q, kv, table, scale=SCALE, total=total))
    return 4 * num_pairs * NUM_HEADS * HEAD_DIM / taken / 1e12


def decode_rate(kernels: AttentionKernels, num_requests: int, num_tokens: int) -> float:
    """Return the TB/s at which decodes read scattered KV."""
    device = CudaDevice(0, torch.bfloat16, kernels=kernels)
    q = random(num_requests, NUM_HEADS, HEAD_DIM)
    kv = random(num_requests * num_tokens, 2, NUM_KV_HEADS, HEAD_DIM)
    slots = torch.randperm(len(kv), device=GPU)
    lists = SlotLists.of(list(torch.split(slots, num_tokens)))
    out = Partial.empty(num_requests, NUM_HEADS, HEAD_DIM, GPU)
    graph = torch.cuda.CUDAGraph()
    device.attend_slots(q, kv, lists, scale=SCALE, out=out)
    with torch.cuda.graph(graph):
        device.attend_slots(q, kv, lists, scale=SCALE, out=out)
    return kv.numel() * kv.itemsize / seconds(graph.replay) / 1e12


def measured(
    title: str,
    rate: Callable[[AttentionKernels, int, int], float],
    kernels: Iterable[AttentionKernels],
    shapes: Iterable[tuple[int, int]],
) -> list[dict[str, object]]:
    """Print a table and return its rows."""
    chosen, rows = list(kernels), []
    print(f"\n{title:>18}" + "".join(f"{kind.value:>12}" for kind in chosen))
    for shape in shapes:
        rates = {kind.value: rate(kind, *shape) for kind in chosen}
        print(
            f"{shape[0]:>9}{shape[1]:>9}" + "".join(f"{value:12.2f}" for value in rates.values()), flush=True
        )
        rows.append({"shape": list(shape), **rates})
    return rows


def main() -> None:
    args = script_parser("attention_kernels", __doc__).parse_args()
    has_fa3, has_lightllm = flash_attention3.is_usable(torch.bfloat16, GPU), find_spec("lightllm") is not None
    prompts = [AttentionKernels.TRITON, AttentionKernels.CUDNN, *([AttentionKernels.FA3] if has_fa3 else [])]
    decodes = [AttentionKernels.TRITON, *([AttentionKernels.LIGHTLLM] if has_lightllm else [])]
    numbers = {
        "prompts_tflops": measured("T, S: TFLOP/s", chunk_rate, prompts, CHUNKS),
        "decodes_tb_per_second": measured("B, L: TB/s", decode_rate, decodes, DECODES),
    }
    print_result("attention_kernels", numbers, save=args.save)


if __name__ == "__main__":
    main()
