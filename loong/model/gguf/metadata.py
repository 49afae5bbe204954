"""Metadata of a GGUF file by key, with checked types."""

from math import isfinite
from typing import Final, TypeVar

from loong.core.errors import ConfigError
from loong.model.gguf.header import Header, Value

T = TypeVar("T")
_WORDS: Final = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
_MAX_SHOWN = 80  # letters


class Metadata:
    """The values of one file. All methods raise ConfigError naming the key at fault and its value."""

    def __init__(self, header: Header) -> None:
        """Read the values of `header`. Raises an error without `general.architecture`."""
        self.path, self.values = header.path, header.values
        self.architecture = self.required("general.architecture", str)

    def required(self, key: str, value_type: type[T]) -> T:
        """Return the value of a key that must exist."""
        value = self.optional(key, value_type)
        if value is None:
            raise ConfigError(f"{self.path} lacks {key}, which must be {_WORDS[value_type]}")
        return value

    def optional(self, key: str, value_type: type[T]) -> T | None:
        """Return the value of a key, or None if the file does not have it."""
        value = self.values.get(key)
        return None if value is None else self._checked(key, value, value_type)

    def items(self, key: str, value_type: type[T]) -> list[T]:
        """Return the items of an array, or none if the file does not have the key."""
        values = self.values.get(key, [])
        if not isinstance(values, list):
            raise ConfigError(f"{self.path}: {key} must be an array, got {shown(values)}")
        return [self._checked(key, value, value_type) for value in values]

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0, or `default` if the file does not have the key."""
        value = self.optional(key, int)
        if value is None and default is not None:
            return default
        value = self.required(key, int)
        if value < 1:
            raise self.refusal(key, "above 0")
        return value

    def refusal(self, key: str, expected: str) -> ConfigError:
        """Return the error for a wrong value of a key."""
        return ConfigError(f"{self.path}: {key} must be {expected}, got {shown(self.values.get(key))}")

    def _checked(self, key: str, value: Value, value_type: type[T]) -> T:
        is_boolean = isinstance(value, bool)
        is_number = not isinstance(value, float) or isfinite(value)
        if isinstance(value, value_type) and is_boolean == (value_type is bool) and is_number:
            return value
        raise ConfigError(f"{self.path}: {key} must be {_WORDS[value_type]}, got {shown(value)}")


def shown(value: object) -> str:
    """Return a value of a file as it stands in an error, which a long one does not fill."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
