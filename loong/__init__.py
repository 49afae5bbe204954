"""loong: elastic sequence-parallel LLM serving."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loong.launcher.offline.llm import LLM as LLM
    from loong.launcher.offline.outputs import CompletionOutput as CompletionOutput
    from loong.launcher.offline.outputs import RequestOutput as RequestOutput
    from loong.launcher.offline.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_OFFLINE = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}


def __getattr__(name: str) -> object:
    """Import the classes for Python programs at their first use, because servers do without them."""
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"loong.launcher.offline.{_OFFLINE[name]}"), name)
