"""The shared context of handlers that answer requests."""

from dataclasses import dataclass

from aiohttp import web

from loong.engine.client import EngineClient
from loong.server.api.body import Bodies
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.parsing import short
from loong.server.metrics.request_metrics import RequestMetrics
from loong.server.openai.chat_prompts import ChatPrompts
from loong.server.settings import ServerSettings
from loong.server.structured.grammar_checker import GrammarChecker
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.formats import CallFormat

MAX_MODEL_LENGTH = 256  # characters, if any name is accepted: answers repeat the name


@dataclass(frozen=True, slots=True)
class Server:
    """An engine, and the objects between it and HTTP."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: RequestMetrics
    bodies: Bodies
    chat_prompts: ChatPrompts
    grammars: GrammarChecker
    call_format: CallFormat | None  # format of tool calls; None: unknown

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for a model that is not served, and a 400 for a name that is too long.

        None is allowed.
        """
        served = self.settings.served_model_names
        if name is None or name in served:
            return
        if not self.settings.accepts_any_model:
            is_served = f"{' and '.join(map(repr, served))} {'are' if len(served) > 1 else 'is'} served"
            message = f"the model {short(name)!r} does not exist; {is_served}"
            raise ApiError(404, message, "model_not_found", "model")
        if len(name) > MAX_MODEL_LENGTH:
            message = f"model has {len(name)} characters, but at most {MAX_MODEL_LENGTH} are allowed"
            raise bad_request(message, "model")

    def name_in_answers(self, name: str | None) -> str:
        """Return the name in an answer: the name that the request gave, or the first of the model's names."""
        return self.settings.served_model_name if name is None else name


SERVER = web.AppKey("server", Server)
