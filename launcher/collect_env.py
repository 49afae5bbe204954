"""`loong collect-env`: facts about this machine for a problem report."""

import argparse
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import loong
from loong.hardware.machine import machine_facts, output_of
from loong.launcher.parser import CommandParser

PACKAGES = (
    "torch", "triton", "numpy", "numba", "aiohttp", "uvloop", "pydantic", "msgspec", "pyzmq", "tokenizers",
    "safetensors", "huggingface-hub", "jinja2", "prometheus-client", "transformers", "xgrammar", "gguf",
    "ray", "matplotlib",
)  # fmt: skip
PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "TRITON_", "OMP_", "HF_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `collect-env`."""
    parser = subparsers.add_parser(
        "collect-env",
        help="print what a problem report should say about this machine",
        description="Print versions, hardware and settings; the last line is JSON. Secrets are left out.",
        epilog="examples:\n  loong collect-env > environment.txt\n",
    )
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    """Print a table and one JSON object, and return 0."""
    found = environment()
    for section, facts in found.items():
        print(f"{section}:")
        for name, fact in facts.items():
            print(f"  {name:<20}{fact.replace(chr(10), chr(10) + 22 * ' ')}")
    print(json.dumps(found))
    return 0


def environment() -> dict[str, dict[str, str]]:
    """Return the facts by topic; a fact that is not known is left out."""
    machine = machine_facts()
    if topology := output_of("nvidia-smi", "topo", "-m"):
        machine["gpu_topology"] = topology
    return {
        "loong": {"version": loong.__version__},
        "machine": machine,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "torch": _torch_facts(),
        "environment": _variables(os.environ),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, str]:
    try:
        import torch
    except ImportError as error:  # the error itself is the fact
        return {"import": f"failed: {error}"}
    cuda = torch.version.cuda or "none, this torch is for processors"
    return {
        "cuda": cuda,
        "gpus_seen": str(torch.cuda.device_count()),
        "threads": str(torch.get_num_threads()),
    }


def _variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how loong runs."""
    return {
        name: "***" if any(word in name for word in SECRETS) else value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIXES)
    }
