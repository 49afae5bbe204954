"""Packages that cannot be imported, to be found before the real ones."""

import os
from collections.abc import Mapping
from pathlib import Path


def broken_package(directory: Path, name: str, code: str) -> Mapping[str, str]:
    """Write a package whose import runs `code`; return the environment in which a process finds it first."""
    package = directory / "broken" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))}
