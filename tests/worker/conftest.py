from pathlib import Path

import pytest
from families import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose rotations depend on the length of a request."""
    return write_tiny_model("llama-dynamic", tmp_path_factory.mktemp("model"))
