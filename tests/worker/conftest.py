from pathlib import Path

import pytest
from families import write_tiny_model


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose rotations depend on lengths, or of the family of a parameter."""
    return write_tiny_model(getattr(request, "param", "llama-dynamic"), tmp_path_factory.mktemp("model"))
