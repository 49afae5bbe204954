"""A check that the kernels of attention that an operator asks for are there."""

from importlib.util import find_spec

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ConfigError

_PACKAGES = {AttentionKernels.FA3: "fa3_fwd", AttentionKernels.LIGHTLLM: "lightllm"}


def check_attention_kernels(chosen: AttentionKernels, device: str) -> None:
    """Raise `ConfigError` if the device is no GPU, or the package with the kernels is not installed."""
    if chosen is not AttentionKernels.AUTO and device == "cpu":
        raise ConfigError(f"--attention-kernels {chosen} needs --device cuda; processors have their own")
    package = _PACKAGES.get(chosen)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"--attention-kernels {chosen} needs a package; `pip install 'loong-serving[{chosen}]'`"
        )
