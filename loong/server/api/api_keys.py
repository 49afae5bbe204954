"""API keys, and the user that a request counts for."""

import hmac
from collections.abc import Sequence

from aiohttp import web

KEY_NUMBER = web.RequestKey("key_number", int)


def key_number(authorization: str, keys: Sequence[str]) -> int | None:
    """Return the index of the key in an `Authorization` header.

    The time does not depend on the key's text.
    """
    scheme, _, sent = authorization.partition(" ")
    sent_bytes = sent.encode(errors="surrogateescape")  # headers may hold any bytes
    is_sent = [hmac.compare_digest(sent_bytes, key.encode()) for key in keys]
    return is_sent.index(True) if scheme.lower() == "bearer" and any(is_sent) else None


def user_of(http: web.Request, named: str, num_keys: int) -> str:
    """Return the user that a request counts for.

    With several API keys it is the key of the request, otherwise the name that the request gives.
    """
    return f"key {http[KEY_NUMBER]}" if num_keys > 1 else named
