"""Searches for requests, or messages between engine and workers, that break them.

It decodes frames that are almost messages. It sends requests with single wrong bytes to a server of a
scripted engine, and requests with wrong fields to `loong serve`. The latter are first every field of its
`/openapi.json` at its extremes, then random ones, for which hypothesis varies earlier examples. `/health` is
polled all the time. It ends with an error and the smallest example, if a request is answered with a 5xx other
than 503. It also does if a request is refused without the name of its field, or harms the server.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.model.tiny import CONFIG, tiny_model
from loong.server.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from extremes import extremes, wrong_answers
from fuzzing import check_answer, check_frame, frames, requests, server_in_a_thread, unharmed_server

HEALTH_SECONDS = 0.1  # from one question to the next


def fuzz(examples: SearchStrategy[bytes], check: Callable[[bytes], None], number: int) -> int:
    """Try `number` examples, or fewer if there are no more; raise the error of the first that fails."""
    num_tried = 0

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(examples)
    def try_all(example: bytes) -> None:
        nonlocal num_tried
        num_tried += 1
        check(example)

    try_all()
    return num_tried


@contextmanager
def health_watched(url: str) -> Iterator[Counter[int]]:
    """Count the statuses of `/health` while the context lasts; 0 is no answer."""
    statuses: Counter[int] = Counter()
    is_over = Event()

    def watch() -> None:
        with httpx.Client(timeout=60) as client:
            while not is_over.wait(HEALTH_SECONDS):
                try:
                    statuses[client.get(f"{url}/health").status_code] += 1
                except httpx.TransportError:
                    statuses[0] += 1

    thread = Thread(target=watch)
    thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        thread.join()


def fuzz_an_engine(number: int) -> dict[str, object]:
    """Send requests to a server of a real engine; return the counts by kind, and of healthy probes."""
    with tempfile.TemporaryDirectory() as folder, unharmed_server(Path(folder)) as server:
        described = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
        at_extremes = list(extremes(described))[:number]
        with health_watched(server.url) as statuses:
            if wrong := asyncio.run(wrong_answers(server.url, at_extremes)):
                raise AssertionError("\n".join(wrong))
            num_random = fuzz(
                requests(is_damaged=False),
                lambda data: check_answer(server.address, data),
                max(1, number - len(at_extremes)),
            )
        if set(statuses) != {200}:
            raise AssertionError(f"/health was answered with {dict(statuses)}")
    return {"num_extremes": len(at_extremes), "num_random": num_random, "num_healthy": statuses[200]}


def main() -> None:
    parser = script_parser("fuzz", __doc__)
    parser.add_argument(
        "--num-requests", type=int, default=10_000, help="number of requests to each engine (%(default)s)"
    )
    parser.add_argument(
        "--num-frames", type=int, default=10_000, help="number of frames to decode (%(default)s)"
    )
    args = parser.parse_args()
    num_frames = fuzz(frames(), check_frame, args.num_frames)
    print(f"{num_frames:,} frames: every one refused or understood", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_folder(tiny_model(Path(folder)), CONFIG.eos_token_ids)
        with server_in_a_thread(tokenizer) as address:
            num_damaged = fuzz(requests(), lambda data: check_answer(address, data), args.num_requests)
    print(f"{num_damaged:,} damaged requests: none was the server's fault", flush=True)
    found = fuzz_an_engine(args.num_requests)
    print(
        f"{found['num_extremes']:,} requests at extremes and {found['num_random']:,} at random to an engine: "
        f"none harmed it; /health was 200 all {found['num_healthy']:,} times"
    )
    print_result("fuzz", {"num_frames": num_frames, "num_damaged": num_damaged, **found}, save=args.save)


if __name__ == "__main__":
    main()
