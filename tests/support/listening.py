"""A server over a scripted engine, on a real socket with the production runner."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripted_engine import Serving

from loong.server.app import create_app
from loong.server.engine_client import EngineClient
from loong.server.insight import Insight
from loong.server.listen import bound_socket, serve
from loong.server.settings import ServerSettings
from loong.server.tokenizer import Tokenizer


def serving_with(tokenizer: Tokenizer) -> Serving:
    """What makes such a server of an engine and settings; its context gives the address."""

    @asynccontextmanager
    async def listen(
        engine: EngineClient, insight: Insight | None = None, **settings: object
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
