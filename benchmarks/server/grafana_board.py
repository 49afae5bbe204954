"""Checks that a Grafana board made for vLLM shows data of loong.

Takes the board's JSON file (vLLM's is examples/observability/prometheus_grafana/grafana.json of its sources),
and starts a server of the tiny model. It reads /metrics before and after some requests of every kind. Each
query of each panel is answered from these two as Prometheus would. Exits with 1 if one has no number to show.
"""

import json
import math
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from loong.runs.spawned_server import ServerConfig, spawn_server

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from promql import Scrapes

_VARIABLES = {"model_name": "loong-tiny", "__rate_interval": "1m", "__interval": "1m", "__range": "1m"}


def queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the title and the query of each target, with rows opened and variables filled in."""
    for panel in panels:
        yield from queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            query = re.sub(r"\$\{?(\w+)\}?", lambda found: _VARIABLES.get(found[1], found[0]), target["expr"])
            yield panel["title"], " ".join(query.split())


def ask(url: str) -> None:
    """Send two requests of every way to end: by length, and by a stop string."""
    for fields in ({}, {}, {"stop": [*"abcdefghij"]}, {"stop": [*"klmnopqrst"]}):
        body = json.dumps({"prompt": "hello", "max_tokens": 64, "ignore_eos": True, **fields}).encode()
        request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            answer.read()


def scraped(url: str) -> Scrapes:
    """Return the server's metrics before and after some requests."""
    ask(url)  # series with labels of their own begin with the first

    def scrape() -> str:
        with urlopen(f"{url}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    before, begin = scrape(), time.monotonic()
    ask(url)
    return Scrapes(before, scrape(), time.monotonic() - begin)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("board", type=Path, help="JSON file of the board")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        config = ServerConfig(None, 2, 1, ("--kv-cache-tokens", "4096"), start_timeout=120.0)
        with spawn_server(config, "esp", Path(folder) / "server.log") as url:
            scrapes = scraped(url)
    asked = list(queries(json.loads(args.board.read_text())["panels"]))
    num_empty = 0
    for title, query in asked:
        values = [value for value in scrapes.answer(query).values() if math.isfinite(value)]
        num_empty += not values
        reported = ", ".join(f"{value:.4g}" for value in values[:4]) or "NOTHING"
        print(f"{title}: {reported}{', ...' if len(values) > 4 else ''}   {query}")
    print(json.dumps({"num_queries": len(asked), "num_without_data": num_empty}))
    sys.exit(1 if num_empty or not asked else 0)


if __name__ == "__main__":
    main()
