"""Measures decodes and prompts of built-in shapes on one GPU, next to the roofline's predictions.

Each case is a shape, or a shape with :fp8 (weights) or :fp8kv (weights and KV). Weights are random. A decode
is the median time between the tokens of a lease of requests of 1,024 tokens. A prompt is one step, the median
of three after the first.

    python benchmarks/gpu/model_steps.py llama-3.1-8b llama-3.1-8b:fp8 llama-3.1-8b:fp8kv --save
"""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parents[1] / "scheduling"))

import torch
from model_rooflines import CONTEXT, Prediction
from one_gpu import OneGpu
from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config

BATCHES, PROMPTS = (1, 32, 128), (8192, 32_768)
NUM_STEPS, NUM_PROMPTS = 40, 4


@dataclass(frozen=True)
class Case:
    """A shape, and what is in FP8."""

    model: str
    has_fp8: bool
    has_fp8_kv: bool

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return the case of `MODEL`, `MODEL:fp8` or `MODEL:fp8kv`."""
        model, _, kind = text.partition(":")
        if kind not in ("", "fp8", "fp8kv"):
            raise ValueError(f"a case is MODEL, MODEL:fp8 or MODEL:fp8kv, got {text!r}")
        return cls(model, has_fp8=bool(kind), has_fp8_kv=kind == "fp8kv")

    def gpu(self, num_slots: int) -> OneGpu:
        """Return it on a GPU."""
        return OneGpu(
            self.model,
            num_slots,
            quantization="fp8" if self.has_fp8 else None,
            kv_cache_dtype="fp8" if self.has_fp8_kv else "auto",
        )

    def prediction(self) -> Prediction:
        """Return what the roofline predicts on the fewest H200s."""
        config = find_config(self.model, "dummy", quantization="fp8" if self.has_fp8 else None)
        shape = shape_of(replace(config, has_fp8_kv=self.has_fp8_kv), keeps_fp8=self.has_fp8)
        return Prediction(shape, "h200")


def measure(text: str, prompts: Sequence[int]) -> dict[str, object]:
    """Measure a case, print its line and return it."""
    case, begun_at = Case.parse(text), perf_counter()
    predicted = case.prediction().steps()
    gpu = case.gpu(max(max(prompts), max(BATCHES) * (CONTEXT + NUM_STEPS)))
    started = perf_counter() - begun_at
    decodes = {n: median(gpu.decode(n, CONTEXT, NUM_STEPS)[1:]) for n in BATCHES}
    taken = {n: [gpu.prefill(n, n) for _ in range(NUM_PROMPTS)] for n in prompts}
    found = {n: median(seconds[1:]) for n, seconds in taken.items()}
    print(f"{text:<24} started in {started:.0f} s on one GPU; predicted for {predicted.num_gpus}", flush=True)
    for name, measured, wanted in (
        ("decode of", decodes, predicted.decodes),
        ("prompt of", found, predicted.prompts),
    ):
        for size, seconds in measured.items():
            expected = wanted[size]
            shown = "no room" if expected is None else f"{expected * 1e3:>8.2f}"
            print(f"{name:>20} {size:>6} {seconds * 1e3:>9.2f} ms, predicted {shown}", flush=True)
    del gpu
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "case": text,
        "decodes": decodes,
        "prompts": found,
        "predicted_decodes": predicted.decodes,
        "predicted_prompts": predicted.prompts,
        "predicted_gpus": predicted.num_gpus,
    }


def main() -> None:
    parser = script_parser("model_steps", __doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE", help="MODEL, MODEL:fp8 or MODEL:fp8kv")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=PROMPTS, help="lengths of prompts (%(default)s)"
    )
    args = parser.parse_args()
    rows = [measure(case, args.prompts) for case in args.cases]
    print_result("model_steps", {"torch": torch.__version__, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
