"""The application: the routes over one engine."""

from aiohttp import web
from prometheus_client import CollectorRegistry

from loong.engine.client import EngineClient, EngineInterface, Tracing
from loong.engine.faults import WorkerFaults
from loong.server import status
from loong.server.api.body import Bodies
from loong.server.api.middleware import answer_errors, check_api_key
from loong.server.api.origins import allow_reading, check_origin
from loong.server.api.request_ids import add_request_id, note_request_id
from loong.server.api.sse import EVENT_WRITES, EventWrites
from loong.server.cluster_app import add_cluster, cluster_of
from loong.server.context import SERVER, Server
from loong.server.lightllm.generate import generate, generate_stream
from loong.server.local_engine import LocalEngineClient
from loong.server.metrics.prometheus import MetricFamilies
from loong.server.metrics.request_metrics import RequestMetrics
from loong.server.metrics.request_observers import RequestObservers
from loong.server.metrics.spans import note_traceparent
from loong.server.openai import tokenization
from loong.server.openai.chat import chat_completions
from loong.server.openai.chat_prompts import ChatPrompts
from loong.server.openai.completions import completions
from loong.server.reference.openapi import openapi
from loong.server.remote.forwarding import RemoteCluster, add_forwarding
from loong.server.responses.endpoint import responses
from loong.server.settings import ServerSettings
from loong.server.structured.grammar_checker import GrammarChecker
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.formats import choose_format


def create_app(
    engine: EngineInterface,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    tracing: Tracing | None = None,
    request_observers: RequestObservers | None = None,
    faults: WorkerFaults | None = None,
) -> web.Application:
    """Return the application of a server whose engine runs in this process. Nothing is started."""
    cluster = cluster_of(engine, settings, tracing, request_observers, faults)
    spans = None if request_observers is None else request_observers.spans
    client = LocalEngineClient(engine, cluster.admission, spans)
    app = create_api(client, tokenizer, settings, cluster.registry, has_spans=spans is not None)
    add_cluster(app, cluster)
    return app


def create_remote_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    registry: CollectorRegistry,
    cluster: RemoteCluster,
) -> web.Application:
    """Return the application of a server whose engine runs in another process. Nothing is started."""
    app = create_api(engine, tokenizer, settings, registry, has_spans=cluster.has_spans)
    add_forwarding(app, cluster)
    return app


def create_api(
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    registry: CollectorRegistry,
    *,
    has_spans: bool,
) -> web.Application:
    """Return the application that answers requests, with the engine in this process or another."""
    middlewares = [note_request_id, answer_errors, check_origin, check_api_key]
    if has_spans:
        middlewares.append(note_traceparent)
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    app.on_response_prepare.append(add_request_id)
    grammars = GrammarChecker(tokenizer.folder, engine.limits.vocab_size)
    chat_prompts = ChatPrompts(tokenizer)
    app.on_cleanup.extend((lambda _: grammars.close(), lambda _: chat_prompts.close()))
    app.on_response_prepare.append(allow_reading)
    app[EVENT_WRITES] = EventWrites()
    app[SERVER] = Server(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        metrics=RequestMetrics(MetricFamilies(registry, settings.served_model_name)),
        bodies=Bodies(settings),
        chat_prompts=chat_prompts,
        grammars=grammars,
        call_format=choose_format(tokenizer.tool_template, settings.tool_call_parser),
    )
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.post("/generate", generate),
            web.post("/generate_stream", generate_stream),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{model:.+}", status.model),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.get("/version", status.version),
            web.get("/openapi.json", openapi),
        ]
    )
    return app
