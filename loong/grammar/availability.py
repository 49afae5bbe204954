"""Availability of xgrammar, an optional package with a native library."""

from importlib.util import find_spec

ARE_REFUSED = "response_format, structured_outputs and guided fields are refused"
NOT_INSTALLED = "xgrammar is not installed; pip install xgrammar"
_MAX_REASON = 200  # characters


def is_installed() -> bool:
    """Return whether xgrammar is installed. Nothing is imported, so its import may still fail."""
    return find_spec("xgrammar") is not None


def import_failure() -> str | None:
    """Return the reason in one line why xgrammar cannot be imported, or None.

    The first call takes a second.
    """
    try:
        from xgrammar import (  # noqa: F401  all that is used of it: an old one may lack some
            GrammarCompiler,
            GrammarMatcher,
            TokenizerInfo,
            VocabType,
            allocate_token_bitmask,
        )
    except Exception as error:  # noqa: BLE001  an import runs the package's code, which may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "xgrammar":
            return NOT_INSTALLED
        reason = " ".join(str(error).split())[:_MAX_REASON]
        return f"xgrammar cannot be imported: {type(error).__name__}: {reason}"
    return None
