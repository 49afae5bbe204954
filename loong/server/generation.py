"""One request's way through the engine, counted and logged."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from loong.core.errors import ClusterError, LoongError
from loong.core.request import FinishReason, Request
from loong.server.context import Server
from loong.server.output import Delta, Output, OutputOptions

logger = logging.getLogger(__name__)


async def generate(
    server: Server, request: Request, options: OutputOptions, arrived_at: float, *, choice: int = 0
) -> AsyncGenerator[Delta, None]:
    """The answer to an admitted request, token by token, as the choice of this index.

    `arrived_at` is of the monotonic clock.

    Closing it early, or cancelling whoever waits for it, aborts the request. Raises `ClusterError`.
    """
    output = Output(request.sampling_params, options, server.tokenizer, choice)
    reason = FinishReason.ABORT
    last_token_at = arrived_at
    try:
        async with aclosing(server.engine.generate(request)) as tokens:
            async for token in tokens:
                now = time.monotonic()
                if output.num_tokens == 0:
                    server.admission.stop_waiting(request.request_id)
                    server.metrics.saw_first_token(now - arrived_at, len(request.prompt_token_ids))
                else:
                    server.metrics.saw_token(now - last_token_at)
                last_token_at = now
                delta = output.add(token)
                if delta.finish_reason is not None:
                    break
                yield delta
            else:
                raise ClusterError(f"the engine ended request {request.request_id} without a reason")
        reason = delta.finish_reason
        yield delta
    except LoongError as error:
        reason = FinishReason.ERROR
        logger.warning("request %s failed after %d tokens: %s", request.request_id, output.num_tokens, error)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        if reason is FinishReason.ABORT:
            num_tokens = output.num_tokens
            logger.info("request %s aborted after %d tokens: nobody listens", request.request_id, num_tokens)
        raise
    finally:
        server.metrics.saw_end(reason, time.monotonic() - arrived_at, output.num_tokens)
