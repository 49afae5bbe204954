import gc
import os
import signal
import sys
from functools import cache

import httpx
import httpx2
import pytest
import torch
from hypothesis import settings

# A busy machine fails no law. Every run tries the same examples. `--hypothesis-profile thorough` tries many
# more, and others each time.
settings.register_profile("quick", deadline=None, max_examples=12, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile("quick")

# Before anything imports Triton, which looks once: kernels are interpreted, unless `-m` asks for GPU tests.
# The workers of `-n` do not see the command line, but inherit the choice.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() and "-m" in sys.argv else "1"

# As in workers. Tests run at the same time, and threads that wait for their part of a small tensor spin.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

# A shell's background jobs ignore interrupts, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Loading the system's certificates takes tens of milliseconds. Let all HTTP clients share one SSL context.
for client in (httpx, httpx2):
    pytest.MonkeyPatch().setattr(
        f"{client.__name__}._transports.default.create_ssl_context", cache(client.create_ssl_context)
    )

# Tests are no garbage. Looking for some takes a third of the time of collection, and time in each test.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage again, among what tests make."""
    gc.enable()
    gc.freeze()
