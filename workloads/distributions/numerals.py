"""Numbers as specs write them: the shortest text that reads back as the same number."""

LARGEST_PLAIN = 1e15  # whole numbers below it are written digit by digit


def numeral(value: float) -> str:
    """Return `value` in digits, without a point if it is whole."""
    if abs(value) < LARGEST_PLAIN and value == int(value):
        return str(int(value))
    return repr(value)
