"""Counts what each built-in shape of a model takes, and predicts its steps by the roofline. Needs no device.

It counts the bytes of weights by format, and of KV with and without windows. It predicts decodes of 1, 32 and
128 requests of 1,024 tokens, and prompts of 8k and 32k in one step. They are on the fewest GPUs that have
room for the weights and a prompt of 32k. Experts that a step reads are those that its tokens choose by
chance.

    python benchmarks/scheduling/model_rooflines.py --write  # the tables of docs/models.md
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from page_table import DOCS, write_table
from result import print_result, script_parser

from loong.core.cost.cost_model import prefill_time
from loong.core.cost.work import step_work
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement
from loong.core.request import RequestView
from loong.hardware.devices import DEVICES
from loong.hardware.memory import weight_bytes
from loong.hardware.model_shape import shape_of
from loong.model.config import DTYPE_BYTES, ModelConfig
from loong.model.shapes import SHAPES, find_config
from loong.model.tensor_shapes import expected_shapes, is_quantized
from loong.scheduler.common.striping import batch_of, decode_part
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.roofline import ModelShape, kv_capacity, roofline

PAGE, GPUS, FORMATS = DOCS / "models.md", ("h100", "h200"), ("bfloat16", "fp8")
BATCHES, CONTEXT, PROMPTS = (1, 32, 128), 1024, (8192, 32_768)
LENGTHS = (8192, 131_072)  # at which KV is counted
TP_SIZES = (1, 2, 4, 8)
MXFP4_BITS = 4 + 8 / 32  # a parameter, with a scale for 32
AWQ_BITS = 4 + (16 + 4) / 128  # with a scale and a zero for 128


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model."""

    weights: int  # in bfloat16
    weights_fp8: int
    four_bits: int  # of a checkpoint in MXFP4 (experts of gpt-oss) or AWQ, which is dequantized at load
    kv: int  # a token, in all layers
    kv_fp8: int
    kv_in_windows: dict[int, float]  # a token of requests of each length, if windows kept no more


@dataclass(frozen=True)
class Predicted:
    """The steps of a model on GPUs of one kind, in seconds; None where KV has no room."""

    num_gpus: int
    decodes: dict[int, float | None]
    prompts: dict[int, float]


def four_bit_bytes(config: ModelConfig) -> int:
    """Return the bytes of a checkpoint with weights of 4 bits."""
    is_stacked = config.experts is not None and config.experts.is_stacked
    bits, wide = (MXFP4_BITS if is_stacked else AWQ_BITS), 8 * DTYPE_BYTES[config.dtype]
    return sum(
        round(prod(shape) * (bits if _has_four_bits(name, is_stacked=is_stacked) else wide) / 8)
        for name, shape in expected_shapes(config).items()
    )


def _has_four_bits(name: str, *, is_stacked: bool) -> bool:
    return is_quantized(name) and (".experts." in name or not is_stacked)


def sizes_of(name: str) -> Sizes:
    """Return the bytes of a built-in shape."""
    plain = find_config(name, "dummy")
    fp8 = find_config(name, "dummy", quantization="fp8", kv_cache_dtype="fp8")
    shape = shape_of(plain)
    return Sizes(
        weights=weight_bytes(plain),
        weights_fp8=weight_bytes(fp8, keeps_fp8=True),
        four_bits=four_bit_bytes(plain),
        kv=plain.kv_layout().bytes_per_token,
        kv_fp8=fp8.kv_layout().bytes_per_token,
        kv_in_windows={length: shape.read_kv_bytes(length) / length for length in LENGTHS},
    )


@dataclass(frozen=True)
class Prediction:
    """Predictions for a shape on some GPUs of one kind."""

    shape: ModelShape
    gpu: str

    @cached_property
    def num_gpus(self) -> int:
        """Return the fewest GPUs with room for the weights and the longest prompt."""
        fitting = [n for n in TP_SIZES if self._capacity(n) > max(PROMPTS)]
        return fitting[0]

    def steps(self) -> Predicted:
        """Return all steps."""
        room = self._capacity(self.num_gpus)
        decodes = {n: self._decode(n) if n * CONTEXT <= room else None for n in BATCHES}
        prompts = {n: prefill_time(self._model(n), n, 0, 1) for n in PROMPTS}
        return Predicted(self.num_gpus, decodes, prompts)

    def _capacity(self, num_gpus: int) -> int:
        is_cut = self.shape.num_kv_heads % num_gpus == 0
        return kv_capacity(self.shape, DEVICES[self.gpu], num_gpus) if is_cut else 0

    def _model(self, num_tokens: int) -> WorkCostModel:
        return roofline(self.shape, DEVICES[self.gpu], self.num_gpus, num_tokens=num_tokens)

    def _decode(self, num_requests: int) -> float:
        """Return the seconds of a step after the first of a lease."""
        placements = {
            f"r{i}": Placement((KVSegment(f"r{i}", range(CONTEXT), 0),)) for i in range(num_requests)
        }
        views = [RequestView(r, CONTEXT, 1, 10, 0.0, None, placement) for r, placement in placements.items()]
        batch = batch_of(ESPGroup((0,)), [decode_part(view, 0) for view in views])
        return self._model(num_requests).step_time(step_work(batch, placements, is_first=False))


def predictions_of(name: str) -> dict[str, dict[str, Predicted]]:
    """Return the steps of a built-in shape, by format of its weights and by GPU."""
    found = {}
    for kind in FORMATS:
        config = find_config(name, "dummy", quantization="fp8" if kind == "fp8" else None)
        shape = shape_of(replace(config, has_fp8_kv=False), keeps_fp8=kind == "fp8")
        found[kind] = {gpu: Prediction(shape, gpu).steps() for gpu in GPUS}
    return found


def size_table(sizes: dict[str, Sizes]) -> Iterator[str]:
    """Yield the lines of the table of bytes."""
    yield "|shape|weights in bfloat16 / FP8, GB|4 bits in files, GB|KV a token in bfloat16 / FP8, KB|"
    yield f"|---|{'---:|' * 3}"
    for name, its in sizes.items():
        weights = f"{its.weights / 1e9:.1f} / {its.weights_fp8 / 1e9:.1f}"
        yield f"|`{name}`|{weights}|{its.four_bits / 1e9:.1f}|{its.kv / 1e3:.0f} / {its.kv_fp8 / 1e3:.0f}|"


def window_table(sizes: dict[str, Sizes]) -> Iterator[str]:
    """Yield the lines of the table of KV that layers with a window would need."""
    lengths = [f"{length // 1024}k" for length in LENGTHS]
    columns = [f"GB of a request of {length}: now / needed" for length in lengths]
    yield f"|shape|KB a token: now / needed at {' / '.join(lengths)}|{'|'.join(columns)}|"
    yield f"|---|{'---:|' * (1 + len(LENGTHS))}"
    for name, its in sizes.items():
        if max(its.kv_in_windows.values()) < its.kv:
            tokens = " / ".join(f"{size / 1e3:.0f}" for size in (its.kv, *its.kv_in_windows.values()))
            requests = [
                f"{length * its.kv / 1e9:.2f} / {length * needed / 1e9:.2f}"
                for length, needed in its.kv_in_windows.items()
            ]
            yield f"|`{name}`|{tokens}|{'|'.join(requests)}|"


def step_table(predicted: dict[str, dict[str, dict[str, Predicted]]]) -> Iterator[str]:
    """Yield the lines of the table of steps."""
    batches = " / ".join(map(str, BATCHES))
    prompts = " / ".join(f"{length // 1024}k" for length in PROMPTS)
    columns = [f"{gpu.upper()}s|decode of {batches}, ms|prompt of {prompts}, ms" for gpu in GPUS]
    yield f"|shape|{'|'.join(columns)}|"
    yield f"|---|{'---:|' * 3 * len(GPUS)}"
    for name, by_format in predicted.items():
        for kind, by_gpu in by_format.items():
            cells = [cell for steps in by_gpu.values() for cell in _cells(steps)]
            yield f"|`{name}`{', FP8' if kind == 'fp8' else ''}|{'|'.join(cells)}|"


def _cells(steps: Predicted) -> Sequence[str]:
    decodes = " / ".join("no room" if s is None else f"{s * 1e3:.1f}" for s in steps.decodes.values())
    return str(steps.num_gpus), decodes, " / ".join(f"{s * 1e3:,.0f}" for s in steps.prompts.values())


def _numbers(by_gpu: dict[str, Predicted]) -> dict[str, object]:
    return {gpu: asdict(steps) for gpu, steps in by_gpu.items()}


def main() -> None:
    """Print the tables, and write them into the page on demand."""
    parser = script_parser("model_rooflines", __doc__)
    parser.add_argument("--write", action="store_true", help=f"write the tables into docs/{PAGE.name}")
    args = parser.parse_args()
    sizes = {name: sizes_of(name) for name in SHAPES}
    predicted = {name: predictions_of(name) for name in SHAPES}
    tables = {"windows": window_table(sizes), "sizes": size_table(sizes), "steps": step_table(predicted)}
    for table, found in tables.items():
        lines = list(found)
        print("\n".join(lines), end="\n\n")
        if args.write and not write_table(PAGE, table, Path(__file__).name, lines):
            parser.error(f"{PAGE.name} has no place for table {table}")
    numbers = {
        name: {
            "sizes": asdict(sizes[name]),
            "steps": {kind: _numbers(its) for kind, its in by_format.items()},
        }
        for name, by_format in predicted.items()
    }
    print_result("model_rooflines", {"models": numbers}, save=args.save)


if __name__ == "__main__":
    main()
