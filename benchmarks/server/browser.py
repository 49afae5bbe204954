"""A headless Chromium, controlled by the DevTools protocol."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

START_SECONDS = 30.0
ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.1
PRESS_SECONDS = 0.1  # as long as a person's click, during which the page may change
_GREETING = "DevTools listening on "


class Page:
    """One tab. `complaints` are the errors of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session_id: str | None = None
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Process the browser's messages, forever."""
        async for message in self._socket:
            reported = json.loads(message.data)
            if "id" in reported:
                self._answers.pop(reported["id"]).set_result(reported)
            else:
                self._note(reported["method"], reported["params"])

    async def open(self) -> None:
        """Open the tab."""
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session_id = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **params: object) -> Any:
        """Call a method of the protocol."""
        number = next(self._ids)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session_id is not None:
            message["sessionId"] = self._session_id
        coming = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await coming
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer}")
        return answer["result"]

    async def show(self, url: str, width: int, height: int, scheme: str) -> None:
        """Open an address in a window of this size, by a color scheme (light or dark)."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; promises are awaited."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return it. Raises `TimeoutError` that names it."""
        try:
            async with asyncio.timeout(seconds):
                while not (value := await self.evaluate(expression)):  # noqa: ASYNC110  the page calls nobody
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"not so after {seconds:g} s: {expression}") from None
        return value

    async def click(self, x: float, y: float) -> None:
        """Press and release the mouse at a point of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
            await asyncio.sleep(PRESS_SECONDS)

    async def drag(self, start: float, end: float, y: float) -> None:
        """Press the mouse at one place, and release it at another of the same height."""
        for kind, x, buttons in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1
            )

    async def click_on(self, selector: str) -> None:
        """Scroll an element into sight and click in its middle."""
        middle = await self.until(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); if (!it) return null;"
            "it.scrollIntoView({block: 'center'}); const box = it.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        await self.click(*middle)

    async def screenshot(self, path: Path, max_height: int = 1_000_000) -> None:
        """Write the page as a PNG, from its top to its end or to `max_height` pixels."""
        metrics = (await self.send("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(metrics["height"], max_height)
        clip = {"x": 0, "y": 0, "width": metrics["width"], "height": height, "scale": 1}
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240  nothing waits

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browser_page(executable: str) -> AsyncIterator[Page]:
    """Yield a tab of a browser of our own, which ends with the context."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            executable,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            address = await _address(process)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                await page.open()
                yield page
                listening.cancel()
        finally:
            process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        async for raw in process.stderr:
            line = raw.decode(errors="replace").strip()
            if line.startswith(_GREETING):
                return line.removeprefix(_GREETING)
    raise RuntimeError("the browser ended before it could be talked to")
