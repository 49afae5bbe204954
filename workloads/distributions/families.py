"""Sources that a spec writes with numbers: their parameters, and their construction."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias

from loong.core.errors import ConfigError
from loong.workloads.distributions.documents import LEval
from loong.workloads.distributions.laws import LAWS, Law
from loong.workloads.distributions.shared_prefix import SharedPrefix
from loong.workloads.distributions.system_prompts import MMLULike, SystemPrompt

Drawn: TypeAlias = Law | LEval | SharedPrefix | SystemPrompt | MMLULike
Family: TypeAlias = type[Law] | type[LEval] | type[SharedPrefix] | type[SystemPrompt] | type[MMLULike]

_ALL: tuple[Family, ...] = (LEval, *LAWS, SharedPrefix, SystemPrompt, MMLULike)
FAMILIES = {family.name: family for family in _ALL}


def family_usage(family: Family) -> str:
    """Return how a source of this family is written, such as `fixed(INPUT[,OUTPUT])`."""
    needed = [each.word for each in _parameters(family) if each.is_needed]
    others = [each.word for each in _parameters(family) if not each.is_needed]
    if not needed:
        return f"{family.name}[({','.join(others)})]"
    return f"{family.name}({','.join(needed)}{''.join(f'[,{word}]' for word in others)})"


def built(family: Family, numbers: Sequence[float]) -> Drawn:
    """Return the source of this family with these numbers, in the order of `family_usage`.

    Raises:
        ConfigError: too few numbers, too many, or one out of range.
    """
    parameters = _parameters(family)
    num_needed = sum(each.is_needed for each in parameters)
    check_count(family_usage(family), len(numbers), range(num_needed, len(parameters) + 1))
    build: Callable[..., Drawn] = family
    return build(
        **{
            each.name: whole(each.word, number) if each.is_whole else number
            for each, number in zip(parameters, numbers, strict=False)
        }
    )


def check_count(usage: str, count: int, allowed: range) -> None:
    """Raise `ConfigError` for a source or arrivals written with a count of numbers that is not allowed."""
    if count not in allowed:
        counts, noun = " or ".join(map(str, allowed)), "number" if allowed[-1] == 1 else "numbers"
        raise ConfigError(f"{usage} needs {counts} {noun}, but has {count}")


def whole(word: str, number: float) -> int:
    """Return a number as an integer.

    Raises:
        ConfigError: names it by `word` if it is none.
    """
    if not abs(number) < 2**53 or number != int(number):
        raise ConfigError(f"{word} {number:g} is no whole number")
    return int(number)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A number of a family; `word` is its name in help."""

    name: str
    is_whole: bool
    is_needed: bool

    @property
    def word(self) -> str:
        return self.name.upper()


def _parameters(family: Family) -> list[_Parameter]:
    """Return the numbers that a spec of this family takes, in order."""
    in_order = sorted(fields(family), key=lambda each: each.kw_only is True)
    return [_Parameter(each.name, each.type is not float, each.default is MISSING) for each in in_order]
