"""Makes interpreted kernels faster, in every process that imports this."""

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace_language = interpreter._patch_lang


def _replace_language_once(function: Callable[..., object]) -> Any:
    """Replace the language that a function uses, unless its caller did.

    The interpreter does so at each call of a function by another, which takes longer than the function.
    """
    names = function.__globals__.values()
    used = [module for module in (tl, tl.core) if any(module is name for name in names)]
    if any(tl.core.is_builtin(module.load) for module in used):
        return _replace_language(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _replace_language_once
