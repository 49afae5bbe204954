"""Lets threads of a process interpret kernels at the same time, as streams of a GPU run them.

Triton replaces its language while it interprets a kernel, and keeps the program's place in a global. In a
process that imports this, the language stays replaced, and each thread has a place of its own.
"""

from threading import Lock, local
from typing import Any

import interpreted_kernels  # noqa: F401 - it replaces the language, unless that is done
from triton.runtime import interpreter

_places = local()
_replacing = Lock()
_replace_language = interpreter._patch_lang


def _replace_for_good(function: Any) -> Any:
    with _replacing:
        return _replace_language(function)


def _of_thread(name: str) -> property:
    return property(
        lambda _builder: getattr(_places, name, None),
        lambda _builder, value: setattr(_places, name, value),
    )


interpreter._patch_lang = _replace_for_good
interpreter._LangPatchScope.restore = lambda _scope: None
for _name in ("grid_idx", "grid_dim"):
    setattr(type(interpreter.interpreter_builder), _name, _of_thread(_name))
