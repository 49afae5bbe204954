"""The grammars and outputs that workers keep; tests of grammars check what is allowed."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import zmq
from socket_worlds import run_in_world

from loong.core.grammar import Grammar, GrammarKind
from loong.core.instance import ESPGroup
from loong.core.instructions import ReleaseKV, RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import SamplingParams
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.world import World
from loong.model.tiny import CONFIG, tiny_model
from loong.wire import BatchDone, Shutdown, decode_report, encode
from loong.worker.config import WorkerConfig
from loong.worker.process import Worker
from loong.worker.sampling.grammar_constraints import Constraints

xgrammar = pytest.importorskip("xgrammar")

STOPS = CONFIG.eos_token_ids
MAX_BYTES = 2**18
NUM_SCHEMAS = 40  # whose grammars take more than twice as much


def live_matchers(replace: Callable[[str, object], None]) -> "weakref.WeakSet[object]":
    """All matchers made from now on that are still there; `replace` sets an attribute of the library."""
    found = weakref.WeakSet[object]()

    class Matcher(xgrammar.GrammarMatcher):  # type: ignore[misc, name-defined]  # the library is an extra
        __hash__ = object.__hash__

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            found.add(self)

    replace("GrammarMatcher", Matcher)
    return found


def as_grammar(content: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def schema(number: int) -> Grammar:
    return as_grammar({"type": "object", "properties": {f"p{number}": {"type": "string"}}})


def test_grammars_take_no_more_than_their_bound_whatever_requests_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More schemas by turns than have room: no answer changes, and matchers go with their grammars."""
    matchers = live_matchers(lambda name, what: monkeypatch.setattr(xgrammar, name, what))
    folder = tiny_model(tmp_path)
    bounded, boundless = (
        Constraints(folder, CONFIG.vocab_size, num_bytes) for num_bytes in (MAX_BYTES, 2**40)
    )
    output = [*b'{"p']
    for length in range(len(output) + 1):
        for number in range(NUM_SCHEMAS):
            asked = f"r{number}", schema(number), output[:length], STOPS
            assert bounded.allowed(*asked).tolist() == boundless.allowed(*asked).tolist()
            assert 0 < bounded.num_bytes <= MAX_BYTES
    assert boundless.num_bytes > 2 * MAX_BYTES
    assert NUM_SCHEMAS < len(matchers) < 1.5 * NUM_SCHEMAS


def test_a_grammar_larger_than_the_bound_is_kept_alone(tmp_path: Path) -> None:
    constraints = Constraints(tiny_model(tmp_path), CONFIG.vocab_size, max_bytes=1)
    first, second = (constraints.prepare(schema(number)) for number in range(2))
    assert first.result() is not second.result()
    assert constraints.prepare(schema(1)) is second
    assert constraints.prepare(schema(0)) is not first


def test_a_grammar_that_cannot_be_made_is_not_kept(tmp_path: Path) -> None:
    constraints = Constraints(tiny_model(tmp_path), CONFIG.vocab_size)
    for _ in range(2):
        assert constraints.prepare(as_grammar({"not": {}})).exception() is not None
    assert constraints.num_bytes == 0


def test_a_request_whose_kv_is_released_leaves_no_matcher_behind(tmp_path: Path) -> None:
    """As when its client leaves, with any next token."""
    (found,) = run_in_world(count_matchers, World(1, 1), str(tmp_path))
    assert found == (1, 0)


def count_matchers(fabric: SocketFabric, _instance_id: int, _tp_rank: int, folder: str) -> tuple[int, int]:
    """Those of a worker that has sampled a token of a request with a schema, and once it released its KV."""
    matchers = live_matchers(lambda name, what: setattr(xgrammar, name, what))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        config = worker_config(tiny_model(Path(folder)), folder)
        reports, commands = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        reports.bind(config.reports_endpoint)
        commands.connect(config.commands_endpoint)
        serving = Thread(target=Worker(config, fabric, context).serve, daemon=True)
        serving.start()
        commands.send(encode(first_token_of("r")))
        while not isinstance(decode_report(reports.recv()), BatchDone):
            pass
        num_before = len(matchers)
        for command in (ReleaseKV("r", (0,)), Shutdown()):
            commands.send(encode(command))
        serving.join()
        return num_before, len(matchers)
    finally:
        context.destroy(linger=0)  # threads that wait for batches have sockets too


def first_token_of(request_id: str) -> RunBatch:
    """Return a batch of a prompt of 3 tokens, of which the last samples one that begins an object."""
    positions = range(3)
    plan = BatchPlan(
        ESPGroup((0,)),
        (QueryBlock(request_id, positions, 0, Transfer.KV),),
        (KVSegment(request_id, positions, 0),),
    )
    params = SamplingParams(max_tokens=9, stop_token_ids=STOPS, grammar=schema(0))
    return RunBatch(1, plan, (RequestInput(request_id, (5, 6, 7), 3, 0, Placement(), params),))


def worker_config(model: Path, folder: str) -> WorkerConfig:
    return WorkerConfig(
        instance_id=0,
        tp_rank=0,
        num_instances=1,
        tp_size=1,
        model=str(model),
        load_format="auto",
        dtype=None,
        seed=0,
        kv_capacity=64,
        host_kv_capacity=0,
        run_directory="",
        commands_endpoint=f"ipc://{folder}/commands",
        reports_endpoint=f"ipc://{folder}/reports",
        deadline=60.0,
        num_threads=1,
        tokenizer_folder=str(model),
    )
