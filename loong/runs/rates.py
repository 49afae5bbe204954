"""Request rates as they are written on the command line."""

from math import inf

from loong.core.errors import ConfigError

MAX_RATES = 1_000


def parse_rates(flag: str, text: str, *, may_be_infinite: bool = False) -> tuple[float, ...]:
    """Read requests per second: `2`, `1,2,4`, or `2:8:0.5` for 2, 2.5 ... 8; and `inf` where it may be.

    Raises:
        ConfigError: anything else, or a rate that is not above 0; it names the flag.
    """
    try:
        numbers = [float(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        numbers = []
    is_range = ":" in text
    may_be_infinite = may_be_infinite and not is_range
    if not numbers or not all(number > 0 and (number < inf or may_be_infinite) for number in numbers):
        raise ConfigError(f"{flag} {text!r} is no rate above 0; write 2, or 1,2,4, or 2:8:0.5 for 2 to 8")
    if not is_range:
        return tuple(sorted(set(numbers)))
    if "," in text or len(numbers) != 3 or numbers[0] > numbers[1]:
        raise ConfigError(f"{flag} {text!r} is no range; write FIRST:LAST:STEP, such as 2:8:0.5")
    first, last, step = numbers
    count = int((last - first) / step + 1e-9) + 1
    if count > MAX_RATES:
        raise ConfigError(f"{flag} {text!r} has {count} rates; at most {MAX_RATES} are run")
    return tuple(round(first + index * step, 9) for index in range(count))
