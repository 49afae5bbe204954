"""A check that the kernels of attention that an operator asks for are there."""

from importlib.util import find_spec

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ConfigError

_PACKAGES = {AttentionKernels.FA3: "fa3_fwd", AttentionKernels.LIGHTLLM: "lightllm"}


def check_attention_kernels(chosen: AttentionKernels, device: str, kv_cache_dtype: str = "auto") -> None:
    """Raise `ConfigError` if the device is no GPU, the kernels do not take this KV, or their package is not
    installed.
    """
    if chosen not in (AttentionKernels.AUTO, AttentionKernels.TRITON) and kv_cache_dtype != "auto":
        raise ConfigError(
            f"--attention-kernels {chosen} takes no --kv-cache-dtype {kv_cache_dtype}; only triton does"
        )
    if chosen is not AttentionKernels.AUTO and device == "cpu":
        raise ConfigError(f"--attention-kernels {chosen} needs --device cuda; processors have their own")
    package = _PACKAGES.get(chosen)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"--attention-kernels {chosen} needs a package; `pip install 'loong-serving[{chosen}]'`"
        )
