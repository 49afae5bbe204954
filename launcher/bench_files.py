"""The files of a benchmark: its document, traces and pictures."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from loong.launcher.bench_config import BenchConfig, Server
from loong.launcher.bench_found import Found, MeasuredRun, by_policy
from loong.launcher.embedded import ServerConfig
from loong.launcher.run_document import document_head, goodput_json, without_keys, write_document
from loong.launcher.runs import finite
from loong.server.trace import chrome_trace
from loong.workloads.plot_attainment import plot_attainment
from loong.workloads.plot_style import PICTURE_KINDS, is_available
from loong.workloads.plot_timeline import plot_timelines
from loong.workloads.result import JSON


def write_files(folder: Path, found: Found, config: BenchConfig, command: str) -> None:
    """Write the document, traces and pictures beside the servers' logs, and say so."""
    traces = _write_traces(folder, found.runs)
    document: dict[str, JSON] = {
        **document_head("bench", command, _configuration(config), [config.slo], config.goal),
        "prefill_probe": None if found.probe is None else msgspec.to_builtins(found.probe),
        "goodput": goodput_json(found.goodputs),
        "wall_seconds": found.wall_seconds,
    }
    runs = [
        {
            **run.as_json(),
            "server": _server_json(run.server),
            "trace": traces[run.policy].name if run.history is not None else None,
        }
        for run in found.runs
    ]
    written = [write_document(folder, document, runs), *traces.values()]
    if not is_available():
        print("No picture: matplotlib is not installed; pip install 'loong[bench]'.", file=sys.stderr)
    else:
        written += _draw(folder, found, config)
    ours = dict.fromkeys(run.policy for run in found.runs if isinstance(run.server, ServerConfig))
    written += [folder / f"server-{policy}.log" for policy in ours]
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)


def _write_traces(folder: Path, runs: Sequence[MeasuredRun]) -> dict[str, Path]:
    """Write what servers did, for Perfetto; return the files by policy."""
    paths = {}
    for run in runs:
        if run.history is not None:
            path = folder / f"trace-{re.sub(r'[^A-Za-z0-9._-]+', '-', run.policy)}.json"
            path.write_bytes(msgspec.json.encode(chrome_trace(run.history)))
            paths[run.policy] = path
    return paths


def _draw(folder: Path, found: Found, config: BenchConfig) -> list[Path]:
    """Draw what happened, or of many rates what was attained; return the pictures."""
    if not config.is_single:
        curves = {name: _curve(runs) for name, runs in by_policy(found.runs).items()}
        pictures = [folder / f"attainment.{kind}" for kind in PICTURE_KINDS]
        plot_attainment({config.slo.describe(): curves}, config.goal, pictures)
        return pictures
    histories = {run.policy: run.history for run in found.runs if run.history is not None}
    if not histories:
        print("No picture: the server has no /trace.", file=sys.stderr)
        return []
    pictures = [folder / f"timeline.{kind}" for kind in PICTURE_KINDS]
    plot_timelines(histories, pictures)
    return pictures


def _curve(runs: Sequence[MeasuredRun]) -> list[tuple[float, float]]:
    """Median attainment by rate, of the runs that went to their end."""
    whole = [run for run in runs if not run.is_cut_off]
    rates = sorted({run.rate for run in whole})
    return [
        (rate, median(run.metrics.attainment or 0.0 for run in whole if run.rate == rate)) for rate in rates
    ]


def _configuration(config: BenchConfig) -> dict[str, JSON]:
    load: dict[str, JSON] = msgspec.to_builtins(config.load)
    return {
        **load,
        "rates": [finite(rate) for rate in config.load.rates],
        "burstiness": finite(config.load.burstiness),
        "num_repeats": config.num_repeats,
        "precision": config.precision,
        "policies": list(config.servers),
    }


def _server_json(server: Server) -> dict[str, JSON]:
    fields: dict[str, JSON] = msgspec.to_builtins(server)
    if isinstance(server, ServerConfig):
        fields["extra_arguments"] = without_keys(shlex.join(server.extra_arguments))
    return fields
