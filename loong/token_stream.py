"""The tokens of one request, on their way to the one task that reads them."""

import asyncio
from collections import deque

from loong.core.events import ProducedToken


class TokenStream:
    """A queue for one reader: half as dear as one for many, which matters at thousands of tokens a second."""

    def __init__(self) -> None:
        self._tokens: deque[ProducedToken | None] = deque()
        self._reader: asyncio.Future[None] | None = None  # done as soon as there is a token

    def put(self, token: ProducedToken | None) -> None:
        """Add a token, or None: there will be no more."""
        self._tokens.append(token)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> ProducedToken | None:
        """The next token, in the order in which they were put."""
        if not self._tokens:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._tokens.popleft()
