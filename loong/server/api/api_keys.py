"""Who sends a request, by the API key that came with it."""

import hmac
from collections.abc import Sequence

from aiohttp import web

KEY_NUMBER = web.RequestKey("key_number", int)


def key_number(authorization: str, keys: Sequence[str]) -> int | None:
    """Which of the keys an `Authorization` header carries; takes as long for any but its length."""
    scheme, _, sent = authorization.partition(" ")
    sent_bytes = sent.encode(errors="surrogateescape")  # headers may hold any bytes
    is_sent = [hmac.compare_digest(sent_bytes, key.encode()) for key in keys]
    return is_sent.index(True) if scheme.lower() == "bearer" and any(is_sent) else None


def user_of(http: web.Request, named: str, num_keys: int) -> str:
    """Whom to count a request for: of several keys the one it came with, else whom it names itself."""
    return f"key {http[KEY_NUMBER]}" if num_keys > 1 else named
