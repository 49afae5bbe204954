from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine, Serving

from loong.model.tiny import CONFIG, tiny_model
from loong.server.app import create_app
from loong.server.listen import bound_socket, serve
from loong.server.settings import ServerSettings
from loong.server.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The built-in one, in which the token id of a byte is the byte."""
    folder: Path = tiny_model(tmp_path_factory.mktemp("models"))
    return Tokenizer.from_folder(folder, CONFIG.eos_token_ids)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Serving:
    """A server on a real socket with the production runner; the context gives its address."""

    @asynccontextmanager
    async def listen(engine: ScriptedEngine, **settings: object) -> AsyncIterator[str]:
        app = create_app(engine, tokenizer, ServerSettings("tiny", **settings))  # type: ignore[arg-type]
        with bound_socket("127.0.0.1", 0) as listener:
            runner = await serve(app, listener, shutdown_timeout=1.0)
            try:
                yield "http://{}:{}".format(*runner.addresses[0])
            finally:
                await runner.cleanup()

    return listen
