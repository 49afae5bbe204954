"""Whether xgrammar, an optional package with a native library, can be used here."""

_MAX_REASON = 200  # characters


def import_failure() -> str | None:
    """Return in one line why xgrammar cannot be imported; None if it can. Takes a second at first."""
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
            return "xgrammar is not installed; pip install xgrammar"
        reason = " ".join(str(error).split())[:_MAX_REASON]
        return f"xgrammar cannot be imported: {type(error).__name__}: {reason}"
    return None
