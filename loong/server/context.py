"""What every handler that answers requests shares."""

from dataclasses import dataclass, field

from aiohttp import web

from loong.server.body import Bodies
from loong.server.engine_client import EngineClient
from loong.server.errors import ApiError
from loong.server.grammar_checker import GrammarChecker
from loong.server.ignored_keys import IgnoredKeys
from loong.server.parsing import short
from loong.server.request_metrics import RequestMetrics
from loong.server.settings import ServerSettings
from loong.server.tokenizer import Tokenizer
from loong.server.tools.formats import CallFormat


@dataclass(frozen=True, slots=True)
class Server:
    """An engine with what stands between it and HTTP."""

    engine: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: RequestMetrics
    bodies: Bodies
    grammars: GrammarChecker
    call_format: CallFormat | None  # of calls of tools; None: not known
    ignored_keys: IgnoredKeys = field(default_factory=IgnoredKeys)

    def check_model(self, name: str | None) -> None:
        """Raise a 404 if a client names a model that is not served; not to name one is fine."""
        served = self.settings.served_model_name
        if name is not None and name != served:
            message = f"the model {short(name)!r} does not exist; {served!r} is served"
            raise ApiError(404, message, "model_not_found", "model")


SERVER = web.AppKey("server", Server)
