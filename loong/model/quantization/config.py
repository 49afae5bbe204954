"""The quantization of a model's weights, as `quantization_config` of config.json describes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loong.core.errors import ConfigError

SUPPORTED: Final = (
    "compressed-tensors (float-quantized, 8 bits, dynamic activations)",
    "fp8 (e4m3, dynamic activations)",
    "awq (4 bits, gemm)",
    "gptq (2, 4 or 8 bits)",
    "mxfp4 (experts of gpt-oss)",
)
FLAG_VALUES: Final = ("fp8",)  # of --quantization


class Method(StrEnum):
    """The formats of weights: FP8 or FP4 with scales, or integers that are packed in words."""

    FP8 = "fp8"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"  # of stacked experts; see `stacked_experts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The format of the weights of a model's layers. Which tensors have it, the checkpoint says."""

    method: Method
    block: tuple[int, int] | None = None  # rows and columns of FP8 with one scale; None: whole rows
    bits: int = 8
    group_size: int | None = None  # rows of the input with one scale, of packed integers; None: all
    zero_offset: int = 0  # added to the stored zero of packed integers
    is_stored: bool = True  # False: quantized when weights are loaded

    def __str__(self) -> str:
        """Return a name for people."""
        blocks = "" if self.block is None else f", blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.method} with {self.bits} bits{blocks}"


AT_LOAD: Final = Quantization(method=Method.FP8, is_stored=False)


def parse_quantization(where: str, given: Mapping[str, object]) -> Quantization:
    """Return the format. Raises ConfigError naming what is not supported, and the list of what is."""
    match method := given.get("quant_method", "unknown"):
        case "fp8":
            _check(where, given, "activation_scheme", ("dynamic",), "dynamic")
            _check(where, given, "fmt", ("e4m3",), "e4m3")
            return Quantization(method=Method.FP8, block=_block(where, given.get("weight_block_size")))
        case "compressed-tensors":
            return _parse_compressed_tensors(where, given)
        case "mxfp4":
            return Quantization(method=Method.MXFP4, bits=4)
        case "awq":
            _check(where, given, "version", ("gemm",), "gemm")
            bits = _check(where, given, "bits", (4,))
            return Quantization(method=Method.AWQ, bits=bits, group_size=_group_size(where, given))
        case "gptq":
            bits = _check(where, given, "bits", (2, 4, 8))
            form = given.get("checkpoint_format", "gptq")
            if form not in ("gptq", "gptq_v2"):
                raise _refusal(where, f"checkpoint_format {form!r}")
            group_size, offset = _group_size(where, given), 1 if form == "gptq" else 0
            return Quantization(method=Method.GPTQ, bits=bits, group_size=group_size, zero_offset=offset)
    raise _refusal(where, f"quant_method {method!r}")


def _parse_compressed_tensors(where: str, given: Mapping[str, object]) -> Quantization:
    if (form := given.get("format")) != "float-quantized":
        raise _refusal(where, f"format {form!r}")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal(where, "other than one of config_groups")
    (group,) = groups.values()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    _check(where, weights, "num_bits", (8,))
    _check(where, weights, "type", ("float",))
    if not inputs.get("dynamic"):
        raise _refusal(where, "static or no scales of input_activations")
    if (strategy := weights.get("strategy")) not in ("tensor", "channel", "block"):
        raise _refusal(where, f"strategy {strategy!r} of weights")
    block = _block(where, weights.get("block_structure")) if strategy == "block" else None
    return Quantization(method=Method.FP8, block=block)


def _check(
    where: str, given: Mapping[str, object], name: str, allowed: tuple[object, ...], default: object = None
) -> int:
    value = given.get(name, default)
    if value not in allowed:
        raise _refusal(where, f"{name} {value!r}")
    return value if isinstance(value, int) else 0


def _block(where: str, given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    if isinstance(given, list) and given == [128, 128]:
        return 128, 128
    raise _refusal(where, f"blocks of {given}, not 128 x 128,")


def _group_size(where: str, given: Mapping[str, object]) -> int | None:
    size = given.get("group_size", -1)
    if not isinstance(size, int) or size == 0 or size < -1:
        raise _refusal(where, f"group_size {size!r}")
    return None if size == -1 else size


def _refusal(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where}: quantization_config with {what} is not supported, only {', '.join(SUPPORTED)}"
    )
