"""How many examples a law is tried with, where each takes long."""

from hypothesis import settings


def examples(quick: int, thorough: int) -> settings:
    """Return settings of `quick` examples, or `thorough` ones in the profile of that name."""
    return settings(max_examples=_chosen(quick, thorough))


def seeds(quick: int, thorough: int) -> range:
    """Return the seeds of `quick` runs, or of `thorough` ones in the profile of that name."""
    return range(_chosen(quick, thorough))


def _chosen(quick: int, thorough: int) -> int:
    is_thorough = settings.get_current_profile_name() == "thorough"
    return thorough if is_thorough else quick
