"""`loong split`: flags and output."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError
from loong.launcher.flags import positive

if TYPE_CHECKING:
    from loong.model.splitting.slices import Cut, SplitModel

NUM_TOKENS = 8  # of the trace
LARGEST_CHECKED = 2 << 30  # bytes of weights
_EXAMPLES = """\
examples:
  loong split ./Llama-3.1-8B                  # a folder with config.json; needs no weights
  loong split ./new-family/config.json --num-layers 2 --check
"""


@dataclass(frozen=True)
class Kept:
    """A tensor that a slice leaves to the next."""

    name: str
    shape: tuple[int, ...]  # of all tokens of the trace


@dataclass(frozen=True)
class Boundary:
    """Values that cross the attention of a layer, in bytes a token."""

    sent: float
    received: float
    context: float
    kept: tuple[Kept, ...]

    @property
    def sizes(self) -> tuple[float, float, float]:
        """Return the three sizes."""
        return self.sent, self.received, self.context


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `split`."""
    parser = subparsers.add_parser(
        "split",
        help="cut a model at its attention, and show what would travel",
        description="Trace a model of Hugging Face, and cut its graph at the attention of each layer by "
        "minimum cut. Shows in bytes a token what goes to the KV, what comes back, and what the rest of the "
        "layer needs besides: what travels if other devices attend than compute products (Lamina). Needs "
        "the package transformers.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with a config.json, or that file")
    parser.add_argument(
        "--num-layers", type=positive, metavar="N", help="trace only the first N layers (all of them)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also compute the whole model and its slices with random weights in float32: logits have to be "
        "equal",
    )


def run(args: argparse.Namespace) -> int:
    """Print the cuts and, where loong has the family, whether its decoder cuts the same; return 0.

    Returns 1 if the two differ, or if slices do not compute what the whole model does.
    """
    from loong.model.splitting.slices import split  # imports torch, which `--help` can do without
    from loong.model.splitting.trace import build, read_config, trace

    config = read_config(args.model, args.num_layers)
    cut = split(trace(build(config), NUM_TOKENS))
    boundaries = [_boundary(each) for each in cut.cuts]
    print(f"{args.model}: {len(boundaries)} layers, {len(cut.slices)} slices. Bytes a token:")
    print(f"{'layers':>12} {'q, k, v':>10} {'attention':>10} {'context':>10}  tensors of the context")
    for first, last, boundary in _runs(boundaries):
        layers = f"{first}" if first == last else f"{first} to {last}"
        kept = ", ".join(f"{t.name} {'x'.join(map(str, t.shape))}" for t in boundary.kept) or "none"
        print(f"{layers:>12} {'{:10,.0f} {:10,.0f} {:10,.0f}'.format(*boundary.sizes)}  {kept}")
    same = _compared(args.model, boundaries)
    equal = _checked(cut, config) if args.check else None
    report = {"cuts": [asdict(each) for each in boundaries], "same_as_decoder": same, "equal_logits": equal}
    print(json.dumps(report))
    return 1 if same is False or equal is False else 0


def _boundary(cut: "Cut") -> Boundary:
    return Boundary(
        cut.sent_bytes / NUM_TOKENS,
        cut.received_bytes / NUM_TOKENS,
        cut.context_bytes / NUM_TOKENS,
        tuple([Kept(node.name, tuple(node.meta["val"].shape)) for node in cut.context]),
    )


def _runs(boundaries: list[Boundary]) -> Iterator[tuple[int, int, Boundary]]:
    """Yield the first and the last of layers in a row that are cut alike, with the cut of the first."""
    for _, group in groupby(enumerate(boundaries), key=lambda pair: pair[1].sizes):
        (first, boundary), *rest = group
        yield first, rest[-1][0] if rest else first, boundary


def _compared(model: Path, boundaries: list[Boundary]) -> bool | None:
    """Print and return whether loong's decoder has the same bytes at each attention; None if it has none."""
    from loong.model.hugging_face import load_config

    try:
        config = load_config(model if model.is_dir() else model.parent)
    except ConfigError as error:
        print(f"Not compared with a decoder of loong: {error}")
        return None
    size = config.torch_dtype.itemsize
    queries, row = config.num_heads * config.head_dim * size, config.kv_layout().row_bytes
    own = float(queries + row), float(queries), float(config.hidden_size * size)
    same = all(boundary.sizes == own for boundary in boundaries)
    print(f"loong's own decoder of {config.architecture} cuts {'the same' if same else f'{own} bytes'}.")
    return same


def _checked(cut: "SplitModel", config: object) -> bool:
    """Print and return whether slices compute the logits of the whole model."""
    import torch

    from loong.model.splitting.slices import split
    from loong.model.splitting.trace import build, trace

    num_bytes = 4 * sum(p.numel() for p in cut.graph.parameters())
    if num_bytes > LARGEST_CHECKED:
        raise ConfigError(
            f"--check would make {num_bytes:,} bytes of weights, but makes at most {LARGEST_CHECKED:,}: "
            "name fewer layers by --num-layers"
        )
    torch.manual_seed(0)
    whole = split(trace(build(config, "cpu", torch.float32), NUM_TOKENS, "cpu"))
    input_ids = torch.randint(0, whole.vocab_size, (1, NUM_TOKENS))
    inputs = {"input_ids": input_ids, "position_ids": torch.arange(NUM_TOKENS)[None]}
    with torch.no_grad():
        equal = torch.equal(whole.run(inputs), whole.graph(*inputs.values()))
    print(f"Logits of the slices {'equal' if equal else 'DIFFER FROM'} those of the whole model.")
    return equal
