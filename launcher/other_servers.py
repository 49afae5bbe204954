"""Hints for flags of other servers, and those that ask for what a server of loong does in any case."""

from collections.abc import Mapping

from loong.launcher import sglang_flags, vllm_flags

WHAT_IT_DOES = frozenset(
    {
        *("--enable-chunked-prefill", "--enable-auto-tool-choice"),
        *("--no-enable-log-requests", "--disable-log-requests"),
        "--enable-metrics",  # of SGLang
    }
)
"""Flags without a value that `loong serve` takes silently."""


def hint_of_serve(flag: str) -> str | None:
    """Return what to write instead of a flag of another server; None for any other flag."""
    return _instead_of(flag, vllm_flags.SERVE, "vLLM") or _instead_of(flag, sglang_flags.SERVE, "SGLang")


def hint_of_bench(flag: str) -> str | None:
    """Return what to write instead of a flag of another benchmark; None for any other flag."""
    return _instead_of(flag, vllm_flags.BENCH, "vLLM") or _instead_of(flag, sglang_flags.BENCH, "SGLang")


def _instead_of(flag: str, flags: Mapping[str, str], server: str) -> str | None:
    words = flags.get(flag)
    if words is None:
        return None
    name, _, why = words.partition(": ")
    place = f", and nothing stands in its place: {why}" if name == "none" else f"; write {words}"
    return f", which {server} has{place}"
