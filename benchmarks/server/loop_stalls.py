"""Measures how long a large request blocks the server for others.

Requests of a million token ids, a million characters and the like go to a server of the real application. Its
engine costs nothing. A watchdog in its event loop reports the longest time between two turns. The bound is 50
ms.
"""

import asyncio
import gc
import sys
import tempfile
from pathlib import Path
from statistics import median

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.engine.client import EngineLimits
from loong.model.tiny import CONFIG, tiny_model
from loong.server.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from large_requests import LARGE_REQUESTS, request_bytes, send_and_wait, watched
from listening import serving_with
from scripted_engine import ScriptedEngine

BOUND_SECONDS = 0.050
LIMITS = EngineLimits(max_model_len=2**24, max_request_kv=2**24, vocab_size=264)


async def longest_stalls(tokenizer: Tokenizer, num_rounds: int) -> dict[str, list[float]]:
    """Return the longest stalls in seconds, by request and round."""
    gc.freeze()  # as the server does when it is up
    found: dict[str, list[float]] = {}
    for name in LARGE_REQUESTS:
        request = request_bytes(name)
        for _ in range(num_rounds):
            async with serving_with(tokenizer)(ScriptedEngine(limits=LIMITS)) as url, watched() as stalls:
                status = await asyncio.to_thread(send_and_wait, url, request)
            if status != 200:
                raise SystemExit(f"{name}: the server answered {status}")
            found.setdefault(name, []).append(stalls.longest)
        seconds = sorted(found[name])
        is_kept = "" if seconds[-1] <= BOUND_SECONDS else "  too long"
        print(f"{name:>36}: {1e3 * median(seconds):6.1f} ms, at most {1e3 * seconds[-1]:6.1f}{is_kept}")
    return found


def main() -> None:
    parser = script_parser("loop_stalls", __doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds of each request (%(default)s)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_folder(tiny_model(Path(folder)), CONFIG.eos_token_ids)
        found = uvloop.run(longest_stalls(tokenizer, args.rounds))
    print_result("loop_stalls", found, save=args.save)


if __name__ == "__main__":
    main()
