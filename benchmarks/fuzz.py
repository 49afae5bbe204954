"""Does any request, or any message between engine and workers, find a way to break them?

It sends requests that are almost right to a server on a real socket, and decodes frames that are almost
messages, for so many minutes; hypothesis looks for new ways from what it has seen. It ends with an error and
the smallest example, if it finds one.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from result import print_result, script_parser

from loong.model.tiny import CONFIG, tiny_model
from loong.server.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from fuzzing import check_answer, check_frame, frames, requests, server_in_a_thread

ROUND = 2000  # examples, after which the clock is looked at


def fuzz(examples: SearchStrategy[bytes], check: Callable[[bytes], None], seconds: float) -> int:
    """How many examples were tried; raises what the first that fails does."""
    number = 0

    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(examples)
    def one_round(example: bytes) -> None:
        nonlocal number
        number += 1
        check(example)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one_round()
    return number


def main() -> None:
    parser = script_parser("fuzz", __doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="in all (%(default)s)")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    num_frames = fuzz(frames(), check_frame, 0.2 * seconds)
    print(f"{num_frames:,} frames: every one refused or understood")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_folder(tiny_model(Path(folder)), CONFIG.eos_token_ids)
        with server_in_a_thread(tokenizer) as address:
            num_requests = fuzz(requests(), lambda data: check_answer(address, data), 0.8 * seconds)
    print(f"{num_requests:,} requests: none was the server's fault")
    numbers = {"minutes": args.minutes, "num_frames": num_frames, "num_requests": num_requests}
    print_result("fuzz", numbers, save=args.save)


if __name__ == "__main__":
    main()
