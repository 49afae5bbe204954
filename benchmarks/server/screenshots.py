"""Makes the screenshots of the documentation: of the report, and of the dashboard in several states.

Needs a Chromium (`apt-get install chromium`). Look at each picture before you keep it.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np
from browser import Page, browser_page
from dashboard_check import load, server
from PIL import Image

from loong.runs.spawned_server import ENTRY, spawn_server

DESKTOP, PHONE = (1280, 900), (375, 800)
LOADED_SECONDS = 75.0
NUM_CLIENTS, NUM_CLIENTS_OF_LOSS = 6, 30
WORKER = "loong-worker"
IS_LOSS_SHOWN = "document.getElementById('legend').innerText.includes('lost')"
NUM_COLORS = 256
LOAD = ("--workload", "mixed", "--length-scale", "1/64", "--seed", "1")
OF_DEMO = ("--duration", "15", "--repeat", "3")
SERVERS = ("--num-instances", "4", "--extra-server-args=--kv-cache-tokens 6144", "--policy", "esp,static-sp")
HAS_BARS = "document.querySelectorAll('#instances .points path').length > 10"
WIDEST_BAR = """(() => { const box = [...document.querySelectorAll('#instances .bars .point path')]
  .map((bar) => bar.getBoundingClientRect()).sort((a, b) => b.width - a.width)[0];
  return [box.left + box.width / 2, box.top + box.height / 2]; })()"""


class Album:
    """Takes pictures of a page into a folder, of at most `max_height` pixels from the top."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page, self.folder = page, folder

    async def take(self, name: str, max_height: int = 1500) -> None:
        """Take a picture; the page must have no complaints."""
        path = self.folder / f"{name}.png"
        await self.page.screenshot(path, max_height)
        with Image.open(path) as picture:
            with_fewer_colors(picture.convert("RGB")).save(path, optimize=True)
        assert not self.page.complaints, self.page.complaints
        print(path)

    async def show(self, url: str, size: tuple[int, int], scheme: str, condition: str) -> None:
        """Open an address and wait for a condition."""
        await self.page.show(url, *size, scheme)
        await self.page.until(condition, seconds=60.0)


def with_fewer_colors(picture: Image.Image) -> Image.Image:
    """Return a picture of a third of the bytes: rare colors (of edges) become the nearest common one."""
    pixels = np.asarray(picture).reshape(-1, 3)
    colors, counts = np.unique(pixels, axis=0, return_counts=True)
    commonest = colors[np.argsort(counts)[::-1][:NUM_COLORS]]
    palette = Image.new("P", (1, 1))
    palette.putpalette(commonest.reshape(-1).tolist())
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


async def take_dashboard(album: Album, folder: Path) -> None:
    """Take the dashboard of a server that is idle, then loaded, and then loses a worker."""
    with spawn_server(server(), "esp", folder / "log") as url:
        live = "document.getElementById('state')?.textContent === 'live'"
        await album.show(f"{url}/dashboard", DESKTOP, "light", live)
        await asyncio.sleep(5.0)
        await album.take("dashboard-idle", 900)
        async with load(url, NUM_CLIENTS):
            await asyncio.sleep(LOADED_SECONDS)
            await album.take("dashboard")
            for name, size, scheme in (("dark", DESKTOP, "dark"), ("phone", PHONE, "dark")):
                await album.show(f"{url}/dashboard", size, scheme, live)
                await album.page.until("document.querySelectorAll('#requests td button').length > 5")
                await album.take(f"dashboard-{name}")
        worker = workers_of(url)[0]
        async with load(url, NUM_CLIENTS_OF_LOSS):
            await album.show(f"{url}/dashboard", DESKTOP, "light", live)
            await asyncio.sleep(15.0)
            os.kill(worker, signal.SIGKILL)
            await album.page.until(IS_LOSS_SHOWN)
            await asyncio.sleep(5.0)
            await album.take("dashboard-lost", 900)


async def take_report(album: Album, folder: Path) -> None:
    """Take the report of two policies, and its interactive page with a bar that was clicked."""
    await bench(*LOAD, *OF_DEMO, *SERVERS, "--output-dir", str(folder / "run"))
    shutil.copy(folder / "run" / "timeline-window.png", album.folder / "timeline.png")
    report = (folder / "run" / "report.html").as_uri()
    views = {"report": (DESKTOP, "light"), "report-dark": (DESKTOP, "dark"), "report-phone": (PHONE, "light")}
    for name, (size, scheme) in views.items():
        await album.show(report, size, scheme, "document.querySelectorAll('figure svg').length > 2")
        await album.take(name, 2000)
    await album.show((folder / "run" / "interactive.html").as_uri(), DESKTOP, "light", HAS_BARS)
    await album.page.click(*await album.page.evaluate(WIDEST_BAR))
    await album.page.until("document.querySelectorAll('#clicked tbody tr').length")
    await album.take("interactive", 1200)


async def bench(*arguments: str) -> None:
    """Run `loong bench`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENTRY, "bench", *arguments, stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


def workers_of(url: str) -> list[int]:
    """Return the worker processes of the server that listens there."""
    port = f"\0--port\0{urlsplit(url).port}\0"
    servers = {pid for pid, _, command in _processes() if port in command}
    return [pid for pid, parent, _ in _processes() if parent in servers and _name(pid).startswith(WORKER)]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield id, parent's id and command of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            yield int(folder.name), int(parent), (folder / "cmdline").read_text()


PARTS = {"dashboard": take_dashboard, "report": take_report}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("docs/images"),
        help="folder for the screenshots (%(default)s)",
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts to take (all)")
    parser.add_argument(
        "--browser", default=shutil.which("chromium") or "chromium", help="Chromium to run (%(default)s)"
    )
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        for part in args.only:
            async with browser_page(args.browser) as page:
                await PARTS[part](Album(page, args.output_dir), Path(folder))


if __name__ == "__main__":
    asyncio.run(main())
