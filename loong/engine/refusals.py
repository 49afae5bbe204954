"""Replacements for a plan that broke a rule, or that a policy failed to make."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from math import inf

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidPlanError
from loong.core.plan import Failure, IterationPlan, KVMigration
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.engine.permitted import permitted_part
from loong.scheduler.policy import Policy

logger = logging.getLogger(__name__)

LOG_SECONDS = 1.0
MAX_TRIES = 64  # calls of the policy for one plan, after an error
_REASON = "the scheduler found no valid plan for this request; the server's log says why"


class Refusals:
    """Replaces a refused plan by one that keeps the rules, so that other requests continue.

    A request of a refused part is planned again on later events. It fails when it is refused again after all
    batches and migrations of its first refusal have ended, and no others were started meanwhile.
    """

    def __init__(self, record: Callable[[Snapshot, IterationPlan, Exception], str]) -> None:
        """Set up. `record` saves a refused plan for replay, and returns a clause that names the file."""
        self._record = record
        self._in_flight_at: dict[
            RequestId, frozenset[int | KVMigration]
        ] = {}  # batches and migrations in flight at the first refusal
        self._logged_at = -inf

    def accept(self) -> None:
        """Forget earlier refusals, because the policy has made a valid plan."""
        self._in_flight_at.clear()

    def plan_without_one(
        self, policy: Policy, snapshot: Snapshot, cost_model: CostModel, error: Exception
    ) -> IterationPlan:
        """Return a replacement after the policy has raised `error`.

        If the policy can plan without one of the plannable requests, that request fails. The newest are tried
        first.
        """
        plannable = [view for view in (*snapshot.waiting, *snapshot.running) if view.is_plannable]
        for view in sorted(plannable, key=_age, reverse=True)[:MAX_TRIES]:
            with suppress(Exception):  # this request is not the only cause
                plan = policy(_without(snapshot, view), cost_model)
                check_plan(snapshot, plan)
                self._log(snapshot, IterationPlan(), error, (view,))
                return replace(plan, failures=(*plan.failures, Failure(view.request_id, _REASON)))
        return self.amend(snapshot, IterationPlan(), error)

    def amend(self, snapshot: Snapshot, plan: IterationPlan, error: Exception) -> IterationPlan:
        """Return a replacement for `plan`, which was refused with `error`.

        If nothing else is in flight, at least one request fails, so that there is always progress.
        """
        permitted = permitted_part(snapshot, plan)
        in_flight = _in_flight(snapshot)
        starts_anything = permitted.plan != IterationPlan()
        failing = [
            view
            for view in map(snapshot.request.get, sorted(permitted.refused_ids))
            if view is not None and view.is_plannable and self._is_settled(view.request_id, in_flight)
        ]
        if not (failing or in_flight or starts_anything):
            failing = _newest(snapshot, permitted.refused_ids)
        self._log(snapshot, plan, error, failing)
        if starts_anything:
            self._in_flight_at.clear()  # new work may make other requests plannable
        else:
            self._in_flight_at.update(
                (request_id, self._in_flight_at.get(request_id, in_flight))
                for request_id in permitted.refused_ids
            )
        failures = tuple(Failure(view.request_id, _REASON) for view in failing)
        return replace(permitted.plan, failures=permitted.plan.failures + failures)

    def _is_settled(self, request_id: RequestId, in_flight: frozenset[int | KVMigration]) -> bool:
        before = self._in_flight_at.get(request_id)
        return before is not None and before.isdisjoint(in_flight)

    def _log(
        self, snapshot: Snapshot, plan: IterationPlan, error: Exception, failing: Iterable[RequestView]
    ) -> None:
        """Log every request that fails, and at most one refusal a second."""
        if snapshot.now - self._logged_at >= LOG_SECONDS:
            self._logged_at = snapshot.now
            what = f"{type(error).__name__}: {error}"
            kept = self._record(snapshot, plan, error)
            cause = None if isinstance(error, InvalidPlanError) else error
            message = "a plan was refused, and the part that keeps the rules is carried out: %s; %s"
            logger.error(message, what, kept, exc_info=cause)
        for view in failing:
            logger.error("request %s fails: no valid plan was found", view.request_id)


def _in_flight(snapshot: Snapshot) -> frozenset[int | KVMigration]:
    batches = (batch.batch_id for batch in (*snapshot.batches, *snapshot.ending))
    return frozenset((*batches, *snapshot.migrations, *snapshot.copies))


def _without(snapshot: Snapshot, view: RequestView) -> Snapshot:
    """Return the snapshot without a request. The KV that the request holds still counts as used."""
    waiting = tuple(other for other in snapshot.waiting if other is not view)
    running = tuple(other for other in snapshot.running if other is not view)
    return replace(snapshot, waiting=waiting, running=running)


def _newest(snapshot: Snapshot, refused_ids: frozenset[RequestId]) -> list[RequestView]:
    """Return the newest refused request that can be planned, or else the newest that can be planned."""
    plannable = [view for view in snapshot.request.values() if view.is_plannable]
    named = [view for view in plannable if view.request_id in refused_ids]
    newest = max(named or plannable, key=_age, default=None)
    return [] if newest is None else [newest]


def _age(view: RequestView) -> tuple[float, RequestId]:
    """Return a sort key that orders requests from the oldest to the newest."""
    return view.arrival_time, view.request_id
