"""The files of a benchmark: its document, its traces, and the report of both."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loong.launcher.bench.config import BenchConfig, Server
from loong.launcher.bench.found import BenchFindings, MeasuredRun, missing_runs
from loong.model.sources.source import TINY
from loong.private_files import write_private
from loong.runs.background_load import SHARE_OF_OTHERS
from loong.runs.peer_server import PeerServer
from loong.runs.report.report import report_folder
from loong.runs.run import finite
from loong.runs.run_document import document_head, goodput_json, pareto_json, write_document
from loong.runs.run_tables import curves_of_runs
from loong.runs.shown_command import shown_command
from loong.runs.spawned_server import ServerConfig
from loong.server.metrics.trace import chrome_trace
from loong.workloads.metrics.result import JSON
from loong.workloads.plots.style import NO_PICTURES, is_available


def write_files(folder: Path, found: BenchFindings, config: BenchConfig, command: str) -> None:
    """Write the document, traces, pictures and report into the folder, and print their paths."""
    traces = _write_traces(folder, found.runs)
    document: dict[str, JSON] = {
        **document_head("bench", command, _configuration(config), [config.slo], config.goal),
        "prefill_probe": None if found.probe is None else msgspec.to_builtins(found.probe),
        "goodput": goodput_json(found.goodputs, is_per_class=config.is_per_class),
        "pareto": pareto_json(curves_of_runs(found.runs), config.slo),
        "wall_seconds": found.wall_seconds,
        "missing_runs": [*missing_runs(found, config)],
    }
    ours = dict.fromkeys(run.policy for run in found.runs if isinstance(run.server, ServerConfig))
    logged = [policy for policy in ours if (folder / decision_log_name(policy)).exists()]
    runs = [
        {
            **run.as_json(),
            SHARE_OF_OTHERS: run.share_of_others,
            "num_unfinished": run.num_unfinished,
            "server": _server_json(run.server),
            "trace": traces[run.policy].name if run.history is not None else None,
            "decision_log": decision_log_name(run.policy) if run.policy in logged else None,
        }
        for run in found.runs
    ]
    written = [write_document(folder, document, runs), *traces.values()]
    if not is_available():
        print(NO_PICTURES, file=sys.stderr)
    else:
        written += report_folder(folder)
    logs = [folder / server_log_name(run.policy) for run in found.runs]
    logs += [folder / decision_log_name(policy) for policy in logged]
    written += [path for path in dict.fromkeys(logs) if path.exists()]
    print(f"Wrote {', '.join(map(str, written))}", file=sys.stderr)


def decision_log_name(policy: str) -> str:
    """Return the name of a server's decision log in the folder of a benchmark."""
    return f"decisions-{_file_name(policy)}.jsonl"


def server_log_name(name: str) -> str:
    """Return the name of the file in the folder of a benchmark that has the output of a server."""
    return f"server-{_file_name(name)}.log"


def _file_name(policy: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", policy)


def _write_traces(folder: Path, runs: Sequence[MeasuredRun]) -> dict[str, Path]:
    """Write what servers did, for Perfetto; return the files by policy."""
    paths = {}
    for run in runs:
        if run.history is not None:
            path = folder / f"trace-{_file_name(run.policy)}.json"
            write_private(path, chrome_trace(run.history))
            paths[run.policy] = path
    return paths


def _configuration(config: BenchConfig) -> dict[str, JSON]:
    load: dict[str, JSON] = msgspec.to_builtins(config.load)
    return {
        **load,
        "rates": [finite(rate) for rate in config.load.rates],
        "burstiness": finite(config.load.burstiness),
        "num_repeats": config.num_repeats,
        "precision": config.precision,
        "is_per_class": config.is_per_class,
        "policies": list(config.servers),
        "model": _model(config),
        "chosen": list(config.chosen),
    }


def _model(config: BenchConfig) -> str | None:
    """Return the model that the servers started here serve, if the flags name it; None if there are none."""
    served = {
        server.model or TINY
        for server in config.servers.values()
        if isinstance(server, ServerConfig) and not any("--model" in word for word in server.extra_arguments)
    }
    return ", ".join(sorted(served)) or None


def _server_json(server: Server) -> dict[str, JSON]:
    fields: dict[str, JSON] = msgspec.to_builtins(server)
    if isinstance(server, ServerConfig):
        fields["extra_arguments"] = shown_command(server.extra_arguments)
    if isinstance(server, PeerServer):
        fields["command"] = shown_command(server.command)
    return fields
