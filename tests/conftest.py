import os
import sys

import torch
from hypothesis import settings

settings.register_profile("loong", deadline=None)  # a busy machine fails no law
settings.load_profile("loong")

# Before anything imports Triton, which looks once: kernels are interpreted, unless `-m` asks for GPU tests.
if not torch.cuda.is_available() or "-m" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
