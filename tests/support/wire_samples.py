"""One message of every kind that engine and workers send."""

from loong.core.events import Logprobs, ProducedToken
from loong.core.grammar import Grammar, GrammarKind
from loong.core.instance import ESPGroup
from loong.core.instructions import (
    ExtendLease,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RequestInput,
    RunBatch,
    RunScoredBatch,
    ShareKV,
    Sibling,
    StopLease,
)
from loong.core.kv_layout import LentSlots
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.prompt_logprobs import PromptLogprobs, ScoredChunk
from loong.core.request import FinishReason, SamplingParams
from loong.messages.wire import (
    BatchBegun,
    BatchDone,
    Command,
    CommandDone,
    EndTrace,
    Heartbeat,
    MigrationDone,
    PrepareGrammar,
    PromptScored,
    Report,
    Shutdown,
    SlotsLent,
    StartTrace,
    StepDone,
    WorkerFailed,
    WorkerReady,
)

GROUP = ESPGroup((2, 0))
SEGMENT = KVSegment("r", range(1, 9, 2), 2)
PLAN = BatchPlan(GROUP, (QueryBlock("r", range(9, 10), 0, Transfer.QUERY),), (SEGMENT,), num_steps=3)
INPUT = RequestInput(
    "r",
    [5, 6],
    9,
    1,
    Placement((SEGMENT,)),
    SamplingParams(stop_token_ids=(1, 2), allowed_token_ids=(1, 2, 9), bad_words=((1,), (2, 9))),
    [5],
    [6],
    (Sibling("r-1", SamplingParams(seed=1)),),
)
COMMANDS: tuple[Command, ...] = (
    RunBatch(1, PLAN, (INPUT,)),
    RunScoredBatch(1, PLAN, (INPUT,), (ScoredChunk("r", None, 2), ScoredChunk("s", 7, 0))),
    ExtendLease(1, GROUP, 32),
    StopLease(1, GROUP, 4),
    MoveKV(2, KVMigration(SEGMENT, 0)),
    ReleaseKV("r", (0, 2)),
    LendSlots("loan 1.1.2", 0, 64),
    ShareKV("r", (KVSegment("kv-1", range(0, 8, 2), 1), KVSegment("kv-1", range(1, 8, 2), 0))),
    ReleaseKV("r", (0,), range(3)),
    ReleaseWindows("r", (0, 1), range(0, 9, 2)),
    PrepareGrammar(3, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    StartTrace(4),
    EndTrace(5, "trace.json"),
    EndTrace(6, None),
    Shutdown(),
)
REPORTS: tuple[Report, ...] = (
    WorkerReady(0, 1, "tcp://127.0.0.2:5555"),
    Heartbeat(0, 1, 3),
    BatchBegun(1, 0, 0),
    StepDone(1, 0, (ProducedToken("r", 7, FinishReason.STOP, Logprobs(-0.5, ((7, -0.5), (8, -1.0)))),)),
    BatchDone(1, 0, 0, 3),
    StepDone(2, 0, (ProducedToken("r", 7), ProducedToken("s", 8, FinishReason.LENGTH)), is_last=True),
    PromptScored(
        1, 0, 0, PromptLogprobs("r", range(1, 5, 2), [-0.5, -9.0], [1, 77], [[3, 4]], [[-0.5, -1.0]])
    ),
    MigrationDone(2, 0, 0, is_committed=False),
    CommandDone(3, 0, 1, "no room"),
    SlotsLent("loan 1.1.2", 0, 1, LentSlots("/proc/7/fd/9", 96, ((0, 32), (64, 96)))),
    WorkerFailed(0, 0, "no room"),
    WorkerFailed(0, 0, "it was silent", (1, 0)),
)
