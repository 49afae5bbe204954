"""Looks at the dashboard in a real browser, under load: live updates, clicks, sizes, colors, and the API key.

Needs a Chromium (`apt-get install chromium`). Writes screenshots for inspection; fails if anything is wrong.
"""

import argparse
import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
from browser import Page, browser_page

from loong.runs.spawned_server import ServerConfig, spawn_server

VIEWS = [(width, scheme) for width in (375, 1600) for scheme in ("light", "dark")]
KEY = "a key of this check"
IS_TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"
NUM_CLIENTS = 12
NUM_COLORS = """(() => { const canvas = document.getElementById("gantt");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let i = 0; i < data.length; i += 400) colors.add(data.slice(i, i + 4).join());
  return colors.size; })()"""
SOME_BATCH = """(() => { const canvas = document.getElementById("gantt"), y = 12;
  canvas.scrollIntoView({block: "center"});
  const box = canvas.getBoundingClientRect();
  const row = canvas.getContext("2d").getImageData(0, y, canvas.width, 1);
  for (let x = canvas.width - 12; x > 30; x--) {
    const [red, green, blue] = row.data.slice(4 * x, 4 * x + 3);
    if (Math.max(red, green, blue) - Math.min(red, green, blue) > 60) return [box.left + x, box.top + y];
  }
  return null; })()"""


async def check_view(page: Page, url: str, width: int, scheme: str, folder: Path) -> None:
    """Check the page at one size in one scheme."""
    await page.show(f"{url}/dashboard", width, 900, scheme)
    await page.until("document.getElementById('state')?.textContent === 'live'")
    await page.until("document.querySelectorAll('#requests td button').length > 5")
    await page.until(f"{NUM_COLORS} > 3")
    assert not await page.evaluate(IS_TOO_WIDE), f"the page is wider than {width} pixels"
    before = await page.evaluate("document.getElementById('numbers').innerText")
    await page.until(f"document.getElementById('numbers').innerText !== {before!r}")
    await page.screenshot(folder / f"dashboard-{width}-{scheme}.png")


async def check_clicks(page: Page, folder: Path) -> None:
    """Check that a request shows its story, a batch its requests, and that the page can be paused."""
    await page.click_on("#requests tbody button")
    await page.until("document.querySelectorAll('#story dd p').length > 2")
    story = await page.evaluate("document.getElementById('story').innerText")
    assert "It comes" in story, story
    await page.screenshot(folder / "dashboard-story.png")
    await page.click_on("#story form button")
    await page.until("!document.getElementById('story').open")
    await page.click_on("#pause")
    point = await page.until(SOME_BATCH)
    await page.click(*point)
    await page.until("document.getElementById('story-title').textContent.startsWith('Batch')")
    await page.until("document.querySelectorAll('#story td button').length > 0")
    await page.click_on("#story td button")
    await page.until("document.querySelectorAll('#story dd p').length > 2")
    await page.click_on("#story form button")
    await check_zoom(page, *point)
    await page.click_on("#pause")


async def check_zoom(page: Page, x: float, y: float) -> None:
    """Check that a drawn frame zooms into its seconds, and that a button resets the zoom."""
    await page.drag(x - 40, x + 5, y)
    await page.until("document.getElementById('zoomed').textContent.includes('of the past')")
    await page.click_on("#reset")
    await page.until("document.getElementById('reset').hidden")


async def check_key(page: Page, url: str) -> None:
    """Check that a page without the key asks for it, again if it is wrong, and then works."""
    await page.show(f"{url}/dashboard", 1600, 900, "light")
    for key in ("a wrong one", KEY):
        await page.until("document.getElementById('key')?.open")
        await page.evaluate(f"document.getElementById('key-input').value = {key!r}")
        await page.click_on("#key-form button")
    await page.until("document.getElementById('state')?.textContent === 'live'")
    unexpected = [complaint for complaint in page.complaints if "401" not in complaint]
    assert not unexpected, unexpected


@asynccontextmanager
async def load(url: str, num_clients: int = NUM_CLIENTS) -> AsyncIterator[None]:
    """Send prompts of all lengths, a few at a time, for as long as the context lasts."""
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(ask(session, Random(seed))) for seed in range(num_clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def ask(session: aiohttp.ClientSession, random: Random) -> None:
    """Send requests as one client, without end."""
    while True:
        prompt = [5] * int(10 ** random.uniform(0.5, 3.5))
        body = {"prompt": prompt, "max_tokens": random.randint(2, 60), "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as answer:
            await answer.read()
        await asyncio.sleep(random.uniform(0, 0.4))


def server(*arguments: str) -> ServerConfig:
    """Return the configuration of a server of the tiny model."""
    return ServerConfig(None, 4, 1, ("--kv-cache-tokens", "4096", *arguments), start_timeout=120.0)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("dashboard-check"),
        help="folder for the screenshots (%(default)s)",
    )
    parser.add_argument(
        "--browser", default=shutil.which("chromium") or "chromium", help="Chromium to run (%(default)s)"
    )
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        with spawn_server(server(), "esp", Path(folder) / "log") as url:
            async with load(url), browser_page(args.browser) as page:
                for width, scheme in VIEWS:
                    await check_view(page, url, width, scheme, args.output_dir)
                await check_clicks(page, args.output_dir)
                assert not page.complaints, page.complaints
        with spawn_server(server("--api-key", KEY), "esp", Path(folder) / "log") as url:
            async with browser_page(args.browser) as page:
                await check_key(page, url)
    print(
        f"the dashboard works at {len(VIEWS)} views, with and without a key; look at {args.output_dir}/*.png"
    )


if __name__ == "__main__":
    asyncio.run(main())
