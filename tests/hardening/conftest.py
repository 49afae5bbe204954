from pathlib import Path

import pytest
from listening import serving_with
from scripted_engine import Serving

from loong.model.tiny import CONFIG, tiny_model
from loong.server.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The built-in one, in which the token id of a byte is the byte."""
    folder: Path = tiny_model(tmp_path_factory.mktemp("models"))
    return Tokenizer.from_folder(folder, CONFIG.eos_token_ids)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Serving:
    """A server on a real socket with the production runner; the context gives its address."""
    return serving_with(tokenizer)
