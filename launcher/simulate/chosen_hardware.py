"""The simulated model and hardware: from the flags, and otherwise from a cost model's file."""

import argparse

from loong.core.window_memory import WindowMemory
from loong.hardware.cost_model_file import read_cost_model
from loong.hardware.model_shape import shape_of
from loong.launcher.window_flag import WindowLayers, window_memory
from loong.model.shapes import find_config
from loong.scheduler.cost.roofline import ModelShape
from loong.simulation.cluster import Hardware

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_DEVICE = "h200"


def chosen_hardware(args: argparse.Namespace) -> tuple[str, Hardware]:
    """Return the model's name and its instances.

    Without a flag, a value is taken from the first cost model, if there is one. Raises `ConfigError` if there
    is no such model or device, or a cost model cannot be read.
    """
    measured = tuple(read_cost_model(path) for path in args.cost_model)
    model, device, tp_size = DEFAULT_MODEL, DEFAULT_DEVICE, 1
    if measured:
        model, device, tp_size = measured[0].model, measured[0].device, measured[0].tp_size
    if args.model is None and measured:
        shape = ModelShape(**measured[0].shape)
    else:
        model = args.model or model
        shape = shape_of(find_config(model, "dummy"))
    hardware = Hardware(
        shape,
        args.device or device,
        args.num_instances,
        args.tensor_parallel_size or tp_size,
        args.kv_cache_tokens,
        measured,
        args.num_hosts,
        args.host_kv_tokens,
        args.memory_instances,
        args.memory_kv_tokens,
        args.memory_device,
        _window_memory(args, shape),
    )
    return model, hardware


def _window_memory(args: argparse.Namespace, shape: ModelShape) -> WindowMemory | None:
    """Return the memory of layers with a window, or None if they have as much as others."""
    if args.window_kv_tokens is None:
        return None
    layers = WindowLayers(shape.num_layers, shape.num_window_layers, shape.window)
    num_batched_tokens = args.num_instances * args.max_num_batched_tokens
    return window_memory(args.window_kv_tokens, layers, args.policy or ("esp",), num_batched_tokens)
