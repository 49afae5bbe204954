"""The application: routes over one engine."""

import asyncio

from aiohttp import web

from loong.server import profiling, status, tokenization
from loong.server.admission import Admission
from loong.server.body import Bodies
from loong.server.chat import chat_completions
from loong.server.completions import completions
from loong.server.context import SERVER, Server
from loong.server.dashboard.routes import add_dashboard
from loong.server.engine_client import EngineClient, Tracing
from loong.server.insight import Insight
from loong.server.metrics import ServerMetrics
from loong.server.middleware import check_api_key, tell_errors
from loong.server.openapi import openapi
from loong.server.response_format import SchemaChecker
from loong.server.settings import ServerSettings
from loong.server.spans import note_traceparent
from loong.server.sse import EVENT_WRITES, EventWrites
from loong.server.tokenizer import Tokenizer


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    tracing: Tracing | None = None,
    insight: Insight | None = None,
) -> web.Application:
    """Put a server together; nothing is started."""
    spans = None if insight is None else insight.spans
    middlewares = [tell_errors, check_api_key, *(() if spans is None else (note_traceparent,))]
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    schemas = SchemaChecker(tokenizer.folder, engine.limits.vocab_size)
    app.on_cleanup.append(lambda _: schemas.close())
    app[EVENT_WRITES], app[status.TRACING] = EventWrites(), asyncio.Lock()
    metrics = ServerMetrics(settings.served_model_name, engine.snapshot)
    app[SERVER] = Server(
        engine=engine,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        admission=Admission(
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            retry_after=settings.retry_after,
            max_requests_per_key=settings.max_requests_per_key,
        ),
        bodies=Bodies(settings),
        schemas=schemas,
        tracing=tracing,
        spans=spans,
    )
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{model:.+}", status.model),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.get("/health", status.health),
            web.get("/ping", status.health),
            web.post("/ping", status.health),
            web.get("/version", status.version),
            web.get("/load", status.load),
            web.get("/metrics", status.metrics),
            web.get("/trace", status.trace),
            web.get("/openapi.json", openapi),
            web.post("/start_profile", profiling.start_profile),
            web.post("/stop_profile", profiling.stop_profile),
        ]
    )
    if insight is not None:
        metrics.watch_cost_model(insight.errors)
        insight.when_planned.append(metrics.saw_plan)
        insight.runs.tell(lambda run: metrics.saw_run(run, insight.target_of(run)))
        add_dashboard(app, insight)
    return app
