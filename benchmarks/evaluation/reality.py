"""Policies on real workers, the same requests in virtual time, and other servers in the same sitting.

Workers are processes on CPUs or GPUs. They start once for consecutive policies of several instances, and once
for those of one instance (tp, chunked). The engine runs in this process, without HTTP. After each run the
simulator gets the same requests, policy and cost model, and the planning time of the real run. Its batches
deviate from predictions at random, by as much as the last ones of the real run. CPU instances share the
host's cores there, too. Requests have the first SLO, and are judged under all. Bounds that depend on an
unloaded prefill use the cost model's prediction of it, for all. Results are written after each run, so the
script can be stopped at any time. It reports attainment by length class, the time until all were done, and
whether the backlog grew. Over several rates it also reports all-class goodput, of the rates that were run.

A peer is any server with an OpenAI-compatible API. Its command is started in a process group of its own when
our workers have ended, and the whole group is ended after it. It gets the same load over HTTP. It is taken to
have as many devices as our workers.

Ceilings: mean TTFT and TPOT within 15 %, attainment within 5 points, P90 goodput within 10 %.

    loong profile --num-instances 2 --output profile.json
    python benchmarks/evaluation/reality.py --num-instances 2 --cost-model profile.json \\
        --request-rate 2,4,6,8,10 \\
        --workload-seed 1 2 --output-dir out                           # a curve of each, on CPUs: 7 minutes
    python benchmarks/evaluation/reality.py llama-3.1-8b --load-format dummy --device cuda \\
        --num-instances 2 \\
        --policy esp static-sp replicas chunked tp --workload mixed victim-attacker --length-scale 1/8 1/4 \\
        --request-rate 4,10 --duration 12 --patience 8 --slo tight loongserve-12 --output-dir out
    python benchmarks/evaluation/reality.py llama-3.1-8b --load-format dummy --device cuda \\
        --num-instances 2 \\
        --policy esp esp-fixed-1 esp-fixed-2 replicas --workload 'zipf(1.0,10,131072)' --length-scale 1 \\
        --request-rate 0.5,1,2 --duration 120 --patience 300 --slo tight interactive --output-dir out \\
        --peer tp2 http://127.0.0.1:8100 'COMMAND --port 8100 with two GPUs as one' \\
        --peer dp2 http://127.0.0.1:8101 'COMMAND --port 8101 with two replicas'  # two GPUs, full lengths
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product, takewhile
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from kept_workers import KeptWorkers, kept_workers
from line_picture import write_lines
from real_run import add_worker_flags, chosen_workers
from result import print_result, script_parser
from run_pairs import GOAL, Pairs, RunPair

from loong.core.errors import ClusterError, ConfigError
from loong.executor.lookahead import LookaheadMargin
from loong.launcher.flags import ratio
from loong.launcher.policy_flags import POLICY_NAMES
from loong.runs.background_load import background_load_note, processor_time, share_of_others
from loong.runs.peer_server import PeerServer, spawn_peer
from loong.runs.rates import parse_rates
from loong.runs.run import PolicyRun, RunKey
from loong.runs.spawned_server import sigterm_unwinds
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import admissible_tokens, make_policy, policy_kind
from loong.simulation.cluster import SimulatedCluster, unloaded_prefill, unloaded_work
from loong.simulation.config import Host, Load
from loong.simulation.points import counters_of
from loong.simulation.run import simulate
from loong.workloads.client.client import Target, run_load
from loong.workloads.client.scrape import Scraper
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics.backlog import WorkOf, used_capacity
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.record import TOO_LATE, RequestRecord
from loong.workloads.metrics.result import JSON, columns_json
from loong.workloads.metrics.slo import PrefillTime, SLOLimits, SLORule, parse_slo
from loong.workloads.report.pareto import Devices, DeviceUnit
from loong.workloads.request import SMALLEST_VOCABULARY, WorkloadRequest
from loong.workloads.workload import endless_workload, pace_of

CEILINGS: dict[str, JSON] = {"latency": 0.15, "attainment": 0.05, "goodput": 0.10}
NUM_WARM_UP = 6
MAX_SECONDS = 60.0  # beyond a run's time: workers that take longer have come to a standstill
WARM_UP_SEED = 10_000  # after those that are measured
START_SECONDS = 900.0  # of a peer: engines load weights, compile and capture


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a workload, at some rates for `duration` seconds."""

    workload: str
    length_scale: float
    rates: tuple[float, ...]
    duration: float

    def at(self, rate: float, seed: int) -> list[WorkloadRequest]:
        """Return the arrivals."""
        drawn = endless_workload(
            self.workload,
            seed=seed,
            request_rate=rate,
            burstiness=pace_of(self.workload, rate).burstiness,
            length_scale=self.length_scale,
        )
        return list(takewhile(lambda request: request.arrival_time < self.duration, drawn))

    def warm_up(self) -> list[WorkloadRequest]:
        """Return other requests like these, all at once."""
        drawn = self.at(max(self.rates), WARM_UP_SEED)[:NUM_WARM_UP]
        return [replace(request, arrival_time=0.0) for request in drawn]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings that the runs of all policies share."""

    traffics: tuple[Traffic, ...]
    seeds: tuple[int, ...]
    rules: tuple[SLORule, ...]
    prefill_time: PrefillTime
    patience: float
    work_of: WorkOf
    devices: Devices
    num_cores: float
    output_dir: Path | None

    async def run(
        self, kept: KeptWorkers, policy: str, cluster: SimulatedCluster, traffic: Traffic
    ) -> AsyncIterator[RunPair]:
        """Run a policy under each rate and seed, warmed, and in virtual time.

        Raises `TimeoutError` if workers come to no end, and `ClusterError` if they do too soon.
        """
        async with asyncio.timeout(MAX_SECONDS):
            await kept.serve(policy, cluster, traffic.warm_up(), self._reported)
        for rate in traffic.rates:
            for repeat, seed in enumerate(self.seeds):
                yield await self._pair(kept, cluster, self._asked(policy, rate, seed, repeat), traffic)

    async def run_peer(self, name: str, target: Target, traffic: Traffic) -> AsyncIterator[RunPair]:
        """Run a peer under each rate and seed, warmed."""
        await run_load(replace(target, timeout=MAX_SECONDS), traffic.warm_up())
        for rate in traffic.rates:
            for repeat, seed in enumerate(self.seeds):
                load, before = traffic.at(rate, seed), processor_time()
                over = max(request.arrival_time for request in load) + self.patience
                found = await run_load(replace(target, timeout=over), load)
                records = [_as_over(record, over) for record in found]
                others = share_of_others(before, processor_time())
                asked = self._asked(name, rate, seed, repeat)
                runs = self._judged(asked, traffic, records, ServerCounters())
                yield RunPair((runs,), None, None, None, others)

    def _asked(self, name: str, rate: float, seed: int, repeat: int) -> RunKey:
        return RunKey(name, self.rules[0], rate, GOAL, seed, repeat, is_per_class=True)

    async def _pair(
        self, kept: KeptWorkers, cluster: SimulatedCluster, asked: RunKey, traffic: Traffic
    ) -> RunPair:
        load = traffic.at(asked.rate, asked.seed)
        before = processor_time()
        async with asyncio.timeout(traffic.duration + self.patience + MAX_SECONDS):
            real = await kept.serve(
                asked.policy, cluster, load, self._reported, self.patience, self._decision_log(asked, traffic)
            )
        others = share_of_others(before, processor_time())
        host = Host(num_cores=self.num_cores, plan_time=real.plan_time, noise=real.noise)
        policy = make_policy(asked.policy, PolicyConfig())
        virtual = await asyncio.to_thread(simulate, policy, cluster, Load(load), self._reported, host=host)
        over = max(request.arrival_time for request in load) + self.patience
        ended = [_as_over(record, over) for record in virtual.records]
        measured = self._judged(asked, traffic, real.records, real.counters)
        simulated = self._judged(asked, traffic, ended, counters_of(virtual.stats))
        return RunPair((measured, simulated), real.plan_time, real.noise, real.history, others)

    def _decision_log(self, asked: RunKey, traffic: Traffic) -> Path | None:
        if self.output_dir is None:
            return None
        folder = self.output_dir / traffic.workload / "measured"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"decisions-{asked.policy}-{asked.rate:g}-{asked.seed}.jsonl"

    def _reported(self, num_prompt_tokens: int) -> SLOLimits:
        return self.rules[0].limits(num_prompt_tokens, self.prefill_time)

    def _judged(
        self, asked: RunKey, traffic: Traffic, records: Sequence[RequestRecord], counters: ServerCounters
    ) -> tuple[PolicyRun, ...]:
        """Judge the same records under every rule."""
        runs = []
        end = max(record.finish_time for record in records)
        for rule in self.rules:
            limits_of = rule.limits_of(self.prefill_time)
            used = used_capacity(records, self.work_of, end, self.devices.number, limits_of)
            metrics = compute_metrics(records, limits_of, length_scale=traffic.length_scale)
            columns = columns_json(records, limits_of)
            runs.append(
                PolicyRun(replace(asked, rule=rule), metrics, columns, counters, False, used, self.devices)
            )
        return tuple(runs)


def _as_over(record: RequestRecord, end: float) -> RequestRecord:
    """Return a request as it would be if the run had ended then."""
    is_late = record.is_completed and record.finish_time > end
    return replace(record, error=TOO_LATE) if is_late else record


class Results:
    """The results so far, printed and written as they come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rules = tuple(parse_slo(text) for text in args.slo)
        self.found: dict[Traffic, Pairs] = {}
        self._folder: Path | None = args.output_dir
        self._configuration: dict[str, JSON] = {
            name: value for name, value in vars(args).items() if isinstance(value, str | int | float)
        }

    def add(self, traffic: Traffic, pair: RunPair) -> None:
        """Print a pair, and write all of its traffic."""
        pairs = self.found.setdefault(traffic, Pairs(traffic.workload, self.rules, []))
        pairs.pairs.append(pair)
        print(f"{traffic.workload}: {pair.reported()}", flush=True)
        if self._folder is not None:
            configuration = self._configuration | {
                "workload": traffic.workload,
                "length_scale": traffic.length_scale,
                "rates": list(traffic.rates),
            }
            pairs.write(self._folder / traffic.workload, shlex.join(sys.argv), configuration)

    def report(self, *, save: bool) -> None:
        """Print tables and goodputs, draw the lines, and print all as JSON."""
        panels = []
        for pairs in self.found.values():
            print(f"\n{pairs.title}\n{pairs.table()}\n\n{pairs.class_table()}\n")
            if (background_load := background_load_note(pairs.shares_of_others())) is not None:
                print(background_load)
            for index, rule in enumerate(self.rules):
                for policy, measured, simulated in pairs.goodputs(index):
                    if measured is not None and simulated is not None:
                        print(
                            f"P90 goodput of {policy} under {rule.name}: measured {measured:.3g}, simulated "
                            f"{simulated:.3g} requests/s ({simulated / measured - 1:+.1%})"
                        )
                if len({pair.rate for pair in pairs.pairs}) > 1:
                    panels.append(pairs.panel(index))
                    for policy, rate, virtual in pairs.class_goodputs(index):
                        if rate is not None:
                            reported = "" if virtual is None else f", simulated {virtual:g}"
                            print(
                                f"All-class goodput of {policy} under {rule.name}: {rate:g}{reported} req/s"
                            )
        if self._folder is not None and panels:
            write_lines(panels, self._folder, "reality")
        print_result("reality", self._numbers(), save=save)

    def _numbers(self) -> dict[str, JSON]:
        return {
            **self._configuration,
            "ceilings": CEILINGS,
            "loads": [
                {
                    "workload": traffic.workload,
                    "length_scale": traffic.length_scale,
                    "duration": traffic.duration,
                    "goodputs": {
                        rule.name: [list(found) for found in pairs.goodputs(index)]
                        for index, rule in enumerate(self.rules)
                    },
                    "class_goodputs": {
                        rule.name: [list(found) for found in pairs.class_goodputs(index)]
                        for index, rule in enumerate(self.rules)
                    },
                    "rows": [pair.as_json() for pair in pairs.pairs],
                }
                for traffic, pairs in self.found.items()
            ],
        }


async def compare(args: argparse.Namespace, results: Results) -> None:
    """Run all comparisons."""
    _, model = chosen_workers(args)
    comparison = Comparison(
        traffics=tuple(traffics_of(args)),
        seeds=tuple(args.workload_seed),
        rules=results.rules,
        prefill_time=unloaded_prefill(model, args.num_instances),
        patience=args.patience,
        work_of=unloaded_work(model, args.tensor_parallel_size),
        devices=Devices(args.num_instances * args.tensor_parallel_size, DeviceUnit.of_device(args.device)),
        num_cores=len(os.sched_getaffinity(0)) if args.device == "cpu" else inf,
        output_dir=args.output_dir,
    )
    for policies in by_layout(args.policy):
        left = list(product(comparison.traffics, policies))
        while left:  # with other workers after each failure
            await run_all(args, comparison, results, left)
    for name, peer in args.peer.items():
        await run_peer(name, peer, comparison, results)


async def run_peer(name: str, peer: PeerServer, comparison: Comparison, results: Results) -> None:
    """Measure a peer under all loads, started once for that; its output goes to peer-NAME.log."""
    with TemporaryDirectory() as temporary:
        folder = comparison.output_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with spawn_peer(name, peer, folder / f"peer-{name}.log"):
                model = (await Scraper(peer.base_url).served_model(None)).id
                target = Target(peer.base_url, model, SMALLEST_VOCABULARY)
                for traffic in comparison.traffics:
                    async for pair in comparison.run_peer(name, target, traffic):
                        results.add(traffic, pair)
        except (ConfigError, ServerUnusableError) as error:
            print(f"{name} failed: {error}", flush=True)


async def run_all(
    args: argparse.Namespace, comparison: Comparison, results: Results, left: list[tuple[Traffic, str]]
) -> None:
    """Remove policies from the list as they are run on the same workers, until one fails."""
    config, model = chosen_workers(args, left[0][1])
    async with kept_workers(config, LookaheadMargin.on(model.host)) as kept:
        while left:
            traffic, policy = left.pop(0)
            room = admissible_tokens(policy, config.instances)
            cluster = SimulatedCluster(config.instances, model, room)
            try:
                async for pair in comparison.run(kept, policy, cluster, traffic):
                    results.add(traffic, pair)
            except (ClusterError, TimeoutError) as error:
                print(f"{traffic.workload}: {policy} failed: {error or 'it came to no end'}", flush=True)
                return


def traffics_of(args: argparse.Namespace) -> Iterator[Traffic]:
    """Yield each workload with its scale and rates: given for each, or one for all; or its own pace."""
    scales = args.length_scale * (len(args.workload) if len(args.length_scale) == 1 else 1)
    rates = args.request_rate * (len(args.workload) if len(args.request_rate) == 1 else 1)
    for workload, scale, text in zip(args.workload, scales, rates, strict=True):
        own = pace_of(workload).request_rate
        at = (own,) if own < inf else parse_rates("--request-rate", text)
        yield Traffic(workload, scale, at, args.duration)


def by_layout(policies: Sequence[str]) -> list[list[str]]:
    """Return neighbors that run on the same workers, in the given order."""
    return [list(layout) for _, layout in groupby(policies, lambda policy: policy_kind(policy).max_instances)]


def main() -> None:
    parser = script_parser("reality", __doc__)
    add_worker_flags(parser)
    parser.add_argument(
        "--policy",
        nargs="*",
        choices=POLICY_NAMES,
        default=["esp"],
        help="policies to measure; none for peers alone (esp)",
    )
    parser.add_argument("--workload", nargs="+", default=["mixed"], help="workloads to send (%(default)s)")
    parser.add_argument(
        "--length-scale",
        type=ratio,
        nargs="+",
        default=[1 / 64],
        help="factors that multiply lengths: one for all workloads, or one for each (%(default)s)",
    )
    parser.add_argument(
        "--request-rate",
        nargs="+",
        default=["4"],
        help="requests per second, such as 2,4,8: for all workloads, or for each (%(default)s)",
    )
    parser.add_argument(
        "--duration", type=float, default=45.0, help="duration of arrivals, in seconds (%(default)s)"
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds from the last arrival to the end (%(default)s)"
    )
    parser.add_argument(
        "--workload-seed", type=int, nargs="+", default=[1], help="seeds of the requests (%(default)s)"
    )
    parser.add_argument(
        "--slo",
        nargs="+",
        default=["ttft:100 tpot:20"],
        help="SLO rules to judge by; requests are sent with the first (%(default)s)",
    )
    parser.add_argument(
        "--peer",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "URL", "COMMAND"),
        help="a server to measure as well: COMMAND, one word, starts it so that it answers at URL",
    )
    parser.add_argument(
        "--output-dir", type=Path, help="folder for documents, traces, decision logs and the picture"
    )
    args = parser.parse_args()
    try:
        peers = {
            name: PeerServer.parsed(name, url, command, START_SECONDS) for name, url, command in args.peer
        }
    except ConfigError as error:
        parser.error(str(error))
    names = [*args.policy, *(name for name, _, _ in args.peer)]
    args.peer = peers
    if not names:
        parser.error("name a --policy or a --peer")
    if len(set(names)) < len(names):
        parser.error(f"--policy and --peer name something twice: {' '.join(names)}")
    for flag, values in (("--length-scale", args.length_scale), ("--request-rate", args.request_rate)):
        if len(values) not in (1, len(args.workload)):
            parser.error(f"{flag} has {len(values)} values, and --workload {len(args.workload)}")
    for traffic in traffics_of(args):
        for rate, seed in product(traffic.rates, args.workload_seed):
            if not traffic.at(rate, seed):
                parser.error(
                    f"no request of {traffic.workload} comes in {args.duration:g} s at {rate:g} req/s"
                )
    results = Results(args)
    try:
        with sigterm_unwinds():
            asyncio.run(compare(args, results))
    finally:
        results.report(save=args.save)


if __name__ == "__main__":
    main()
