"""`loong serve`: flags, checked and put into one configuration."""

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import loong
from loong.core.errors import ConfigError
from loong.launcher.cluster_flags import (
    add_instance_flags,
    add_model_flags,
    chosen_cluster,
    with_host_tier,
)
from loong.launcher.config_flags import FieldFlag, add_field_flags, field_values
from loong.launcher.flags import (
    add_host_tier_flag,
    add_memory_instance_flags,
    add_prefix_caching_flag,
    or_auto,
    port,
    positive,
    seconds,
    token_count,
    wait_seconds,
)
from loong.launcher.keys import (
    API_KEY_VARIABLE,
    add_server_key_flags,
    admin_key,
    keys_of_server,
    warn_of_readers,
)
from loong.launcher.other_servers import WHAT_IT_DOES, hint_of_serve
from loong.launcher.policy_flags import POLICY_NAMES, add_policy_flags, policy_config, policy_name
from loong.launcher.serve.record_flags import add_record_flags
from loong.launcher.window_flag import add_window_flag
from loong.processes.logs import queued_log
from loong.runs.outputs import make_folder
from loong.scheduler.policy import policy_kind
from loong.server.settings import ServerSettings
from loong.server.tools.formats import FORMATS as FORMATS_OF_CALLS

if TYPE_CHECKING:
    from loong.launcher.parser import CommandParser
    from loong.launcher.serve.config import ServeConfig
    from loong.model.config import ModelConfig
    from loong.processes.fork_server import ForkServer

logger = logging.getLogger(__name__)

SECRETS = ("api_key", "admin_key")
_LAST_NAME = "last_served_model_name"
_EXAMPLES = """\
examples:
  loong serve smollm2-135m                      # a small real model, fetched on first use
  loong serve                                   # a tiny random one
  loong serve ./SmolLM2-360M.Q8_0.gguf
  loong serve ORG/NAME --revision main          # of the Hugging Face hub
  loong serve ./Llama-3.1-8B --num-instances 2 --tensor-parallel-size 2 --max-model-len 25.6k
  loong serve llama-3.1-8b --load-format dummy --policy static-sp
  loong serve --config serve.yaml --port 8001   # YAML with the flags' names as keys; what is typed wins
"""
_WAITING = "without a first token; beyond it, 503 with Retry-After"
_BOUNDS = (
    FieldFlag("max_waiting_requests", positive, "N", f"bound on requests {_WAITING}"),
    FieldFlag("max_waiting_tokens", token_count, "N", f"bound on prompt tokens of requests {_WAITING}"),
    FieldFlag(
        "max_requests_per_key",
        positive,
        "N",
        "bound on requests in flight of one API key; beyond it, 429 with Retry-After",
        "none",
    ),
)


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Add the command `serve` and its flags."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model. Without MODEL: a tiny built-in random one, made on first use.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.elsewhere, parser.taken_silently = hint_of_serve, WHAT_IT_DOES
    _add_model_flags(parser.add_argument_group("model"))
    cluster = parser.add_argument_group("cluster")
    add_instance_flags(cluster)
    add_window_flag(cluster, "on CPUs, with --policy esp")
    cluster.add_argument(
        "--max-instances",
        type=positive,
        metavar="N",
        help="most instances that `loong scale` can ask for (as many as at the start)",
    )
    add_memory_instance_flags(cluster, "as many as fit into a GPU; on CPUs as many as on others")
    _add_scheduling_flags(parser.add_argument_group("scheduling"))
    server = parser.add_argument_group("server")
    for add in (_add_server_flags, add_record_flags, _add_timeout_flags, _add_fault_flag):
        add(server)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the server; return 0 if that ended well, 1 if the engine failed."""
    if args.trace_dir is not None:
        make_folder("--trace-dir", args.trace_dir)
    with queued_log(args.log_format):
        return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    start = perf_counter()
    check_names(args)
    logger.info("%s", reported_choices(args.chosen))
    if args.allow_fault_injection:
        logger.warning("clients may kill and stop workers: --allow-fault-injection is on")
    with _fork_server(args) as fork_server:  # imports while this process does
        from loong.model.sources.source import check_name
        from loong.server.api.listen import bound_socket

        check_name(args.model, args.load_format)
        with bound_socket(args.host, args.port) as listener:  # before what takes seconds
            from loong.launcher.serve.serving import serve_until_stopped

            config = serve_config(args)
            warn_of_strangers(args, config.server.api_keys)
            logger.info("found %s and sized its KV in %.1f s", config.cluster.model, perf_counter() - start)
            if config.num_engines > 1:
                from loong.launcher.serve.several_engines import serve_engines_until_stopped

                return serve_engines_until_stopped(config, listener)
            return serve_until_stopped(config, listener, fork_server)


def warn_of_strangers(args: argparse.Namespace, api_keys: Sequence[str]) -> None:
    """Warn if other users of this host can read keys, or if all who reach it may use the server."""
    from loong.server.api.origins import is_loopback

    if args.config is not None and (args.api_key or args.admin_key is not None):
        warn_of_readers("--config", args.config)
    if not api_keys and not is_loopback(args.host):
        logger.warning(
            "--host %s without an API key: all who reach it may use this server; set $%s or --api-key-file",
            args.host,
            API_KEY_VARIABLE,
        )


@contextmanager
def _fork_server(args: argparse.Namespace) -> Iterator["ForkServer | None"]:
    """Start what starts workers on this host, and end it with the context. Several engines have their own."""
    if args.hosts != "local" or args.num_engines > 1:
        yield None
        return
    from loong.launcher.cluster.worker_fork_server import worker_fork_server  # `--help` can do without it

    with closing(worker_fork_server()) as fork_server:
        yield fork_server


def reported_choices(chosen: Mapping[str, object]) -> str:
    """Return the options that are not at their defaults, without secrets."""
    words = [
        f"{dest.replace('_', '-')} {'***' if dest in SECRETS else value}" for dest, value in chosen.items()
    ]
    return f"loong {loong.__version__}; options: {', '.join(words) or 'all at their defaults'}"


class _Names(argparse.Action):
    """Collects names, and notes the last of several after one flag, which may have been meant as MODEL."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _flag: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *values])
        if len(values) > 1:
            setattr(namespace, _LAST_NAME, values[-1])


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add_model_flags(group)
    group.add_argument(
        "--max-model-len",
        type=or_auto(token_count),
        metavar="N",
        help="longest prompt with output, in tokens, such as 25.6k (auto: what model and cluster can hold)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action=_Names,
        default=[],
        metavar="NAME",
        help="names of the model in the API, the first one also in metrics; write MODEL before this flag "
        "(the model's name)",
    )
    group.add_argument(
        "--accept-any-model",
        action="store_true",
        help="answer requests that name any other model, by that name",
    )


def _add_scheduling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        type=policy_name,
        choices=POLICY_NAMES,
        default="esp",
        help="scheduling policy; esp: elastic; static-sp: one group; replicas: each alone (%(default)s)",
    )
    add_policy_flags(group)
    add_prefix_caching_flag(group)
    add_host_tier_flag(group)
    group.add_argument(
        "--cost-model",
        type=Path,
        metavar="FILE",
        help="cost model of `loong profile` (the device's roofline)",
    )
    group.add_argument(
        "--calibration-time",
        type=wait_seconds,
        default=4.0,
        metavar="S",
        help="time at the start to calibrate the cost model on processors, unless --cost-model is given; 0 "
        "keeps the roofline (%(default)s)",
    )
    group.add_argument(
        "--recalibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="correct the cost model with measured batch times while serving (on)",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    group.add_argument(
        "--port", type=port, default=8000, help="port to listen on; 0: a free one (%(default)s)"
    )
    add_server_key_flags(group)
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="browser pages that may use the server besides its own, such as https://chat.example.com, or * "
        "for all; may be given repeatedly (none)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=tuple(FORMATS_OF_CALLS),
        help="format in which the model writes tool calls (that of its chat template)",
    )
    group.add_argument(
        "--api-server-count",
        type=positive,
        default=1,
        metavar="N",
        help="processes that answer clients on one port; 1: the server's own (%(default)s)",
    )
    group.add_argument(
        "--num-engines",
        type=positive,
        default=1,
        metavar="N",
        help="processes that plan, each for a share of the instances; 1: the server's own (%(default)s)",
    )
    group.add_argument(
        "--lend",
        action="store_true",
        help="let engines lend each other room for KV, with --num-engines (off)",
    )
    add_field_flags(group, ServerSettings, _BOUNDS)


def _add_fault_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow-fault-injection",
        action="store_true",
        help="let clients kill and stop workers through POST /admin/faults, for `loong chaos` (off)",
    )


def _add_timeout_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--start-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit for each start of a worker, which loads weights (%(default)s)",
    )
    group.add_argument(
        "--drain-timeout",
        type=wait_seconds,
        default=30.0,
        metavar="S",
        help="time that open requests have to finish after a stop signal; 0: none (%(default)s)",
    )


def check_names(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if no MODEL is given, but the last of several names looks like one."""
    last_name = getattr(args, _LAST_NAME, "")
    if args.model is None and ("/" in last_name or Path(last_name).is_file()):
        raise ConfigError(f"--served-model-name took {last_name} for a name; write MODEL before the flag")


def serve_config(args: argparse.Namespace) -> "ServeConfig":
    """Return what the flags say. Raises `ConfigError` if the model is not there or does not fit."""
    from loong.launcher.serve.config import ServeConfig
    from loong.observability.kv_events.config import parsed_kv_events
    from loong.runs.run_logs import LogFiles

    chosen = chosen_cluster(args, args.start_timeout)
    keeps_prefixes = _keeps_prefixes(args, chosen.model)
    name, *other_names = args.served_model_name or [chosen.name]
    return ServeConfig(
        model=chosen.model,
        cluster=with_host_tier(chosen, args.host_kv_tokens) if keeps_prefixes else chosen.cluster,
        device=chosen.device,
        policy_name=args.policy,
        policy=policy_config(args),
        cost_model=args.cost_model,
        calibration_time=args.calibration_time if chosen.device == "cpu" and args.cost_model is None else 0.0,
        is_recalibrated=args.recalibrate,
        server=ServerSettings(
            name,
            keys_of_server(args),
            args.host,
            tuple(args.allowed_origins),
            tuple(other_names),
            args.accept_any_model,
            tool_call_parser=args.tool_call_parser,
            admin_key=admin_key(args),
            **field_values(args, _BOUNDS),
        ),
        tokenizer_folder=chosen.tokenizer_folder,
        max_model_len=args.max_model_len,
        drain_timeout=args.drain_timeout,
        trace_dir=args.trace_dir,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        num_api_servers=args.api_server_count,
        num_engines=args.num_engines,
        lends=args.lend,
        log_format=args.log_format,
        allows_faults=args.allow_fault_injection,
        keeps_prefixes=keeps_prefixes,
        kv_events=None if args.kv_events_config is None else parsed_kv_events(args.kv_events_config),
        relays=args.relay,
        logs=LogFiles(args.decision_log, args.event_log, args.event_log_prompts),
    )


def _keeps_prefixes(args: argparse.Namespace, model: "ModelConfig") -> bool:
    if not args.enable_prefix_caching:
        return False
    if not model.has_shareable_kv:
        logger.info("prefix caching is off: KV of this model depends on the length of the whole sequence")
        return False
    if not policy_kind(args.policy).reads_prefixes:
        logger.info("prefix caching is off: policy %s reads no KV of other requests", args.policy)
        return False
    return True
