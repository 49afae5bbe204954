"""Prompts in all forms that `LLM.generate` takes."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loong.core.errors import InvalidRequestError

TokenIds: TypeAlias = Iterable[int] | npt.NDArray[np.integer]
PromptInput: TypeAlias = str | TokenIds | Mapping[str, object]


class GivenPrompt(NamedTuple):
    """A text or token ids, and the salt of the cached KV that the prompt may share."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def given_prompts(prompts: object) -> list[GivenPrompt]:
    """Return the prompts of one text, token ids or dictionary, or of several in any iterable.

    Raises `InvalidRequestError` that names the prompt for anything else.
    """
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [_given("the prompt", prompts)]
    if not isinstance(prompts, Iterable):
        raise _wrong("prompts", prompts)
    several = list(prompts)
    if several and all(_is_integer(item) for item in several):
        return [_given("the prompt", several)]
    return [_given(f"prompts[{index}]", prompt) for index, prompt in enumerate(several)]


def _given(name: str, prompt: object) -> GivenPrompt:
    if isinstance(prompt, str):
        return GivenPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _of_fields(name, prompt)
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes):
        ids = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        if all(map(_is_integer, ids)):
            return GivenPrompt(None, list(map(int, ids)))
    raise _wrong(name, prompt)


def _of_fields(name: str, prompt: Mapping[str, object]) -> GivenPrompt:
    """Return the prompt of a dictionary with `prompt` or `prompt_token_ids`."""
    known = ("prompt", "prompt_token_ids", "cache_salt")
    if unknown := [key for key in prompt if key not in known and prompt[key] is not None]:
        raise InvalidRequestError(f"{name}: {unknown[0]!r} is not supported, only {', '.join(known)}")
    text, ids, salt = (prompt.get(key) for key in known)
    if not isinstance(salt, str | None):
        raise InvalidRequestError(f"{name}: cache_salt must be a text, but is {type(salt).__name__}")
    if ids is None and text is None:
        raise InvalidRequestError(f"{name}: a dictionary needs prompt or prompt_token_ids")
    given = _given(name, text if ids is None else ids)
    return GivenPrompt(text if isinstance(text, str) else None, given.token_ids, salt)


def _are_token_ids(prompts: object) -> bool:
    return isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "iu"


def _is_integer(item: object) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _wrong(name: str, prompt: object) -> InvalidRequestError:
    what = "a text, token ids, or a dictionary with prompt or prompt_token_ids"
    return InvalidRequestError(f"{name} must be {what}, but is {type(prompt).__name__}", param="prompts")
