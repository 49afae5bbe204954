"""A server over a scripted engine, on a real socket with the production runner."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_engine import Serving

from loong.model.tiny import CONFIG, tiny_model
from loong.server.app import create_app
from loong.server.engine_client import Engine
from loong.server.insight import Insight
from loong.server.listen import bound_socket, serve
from loong.server.settings import ServerSettings
from loong.server.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The built-in one, in which the token id of a byte is the byte."""
    return Tokenizer.from_folder(tiny_model(tmp_path_factory.mktemp("models")), CONFIG.eos_token_ids)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Serving:
    """A server on a real socket with the production runner; the context gives its address."""
    return serving_with(tokenizer)


def serving_with(tokenizer: Tokenizer) -> Serving:
    """What makes such a server of an engine and settings; its context gives the address."""

    @asynccontextmanager
    async def listen(
        engine: Engine, insight: Insight | None = None, **settings: object
    ) -> AsyncIterator[str]:
        chosen = ServerSettings("tiny", **settings)  # type: ignore[arg-type]
        app = create_app(engine, tokenizer, chosen, insight=insight)
        with bound_socket("127.0.0.1", 0) as listener:
            runner = await serve(app, listener, shutdown_timeout=1.0)
            try:
                yield "http://{}:{}".format(*runner.addresses[0])
            finally:
                await runner.cleanup()

    return listen
