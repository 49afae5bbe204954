"""Whether the books of `ClusterState` balance."""

from collections import Counter

from loong.core.books import Books
from loong.core.errors import InvalidEventError
from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId
from loong.core.positions import first_overlap
from loong.core.shared_kv import SharedKV


def check_books(books: Books) -> None:
    """Raise `InvalidEventError` unless the books balance.

    Every position of a live request has one slot, which only requests of one family share, the KV used and
    reserved of each instance adds up and fits, batches, migrations, instances and requests name each other,
    and every request that arrived is live or has ended once.
    """
    _check_views(books)
    _check_requests(books)
    _check_families(books)
    _check_batches(books)
    _check_migrations(books)
    _check_room(books)
    _check_bounds(books)
    if books.stats.num_arrived != books.stats.num_ended + len(books.requests):
        raise InvalidEventError(f"{books.stats} does not fit {len(books.requests)} live requests")


def _check_views(books: Books) -> None:
    snapshot = books.snapshot(now=0.0, version=0)
    lives = books.requests.values()
    fresh = [live.view() for live in lives if live.leader is None and not live.is_leaving]
    waiting = tuple(view for view in fresh if not view.has_begun)
    running = {view.request_id: view for view in fresh if view.has_begun}
    if snapshot.waiting != waiting or {view.request_id: view for view in snapshot.running} != running:
        raise InvalidEventError(f"the views {snapshot.request} are not those of the live requests")


def _check_requests(books: Books) -> None:
    for request_id, live in books.requests.items():
        if shared := first_overlap(s.positions for s in live.placement.segments):
            raise InvalidEventError(f"positions {shared} of request {request_id} are in two slots")
        if live.is_at_rest and live.has_ended:
            raise InvalidEventError(f"request {request_id} has ended but keeps its KV")
        if live.is_at_rest and live.view().num_uncomputed_tokens < 1:
            raise InvalidEventError(f"request {request_id} is not in flight with nothing to compute")


def _check_families(books: Books) -> None:
    for request_id, live in books.requests.items():
        for fork in live.forks:
            if fork.leader is not live or books.requests.get(fork.request.request_id) is not fork:
                raise InvalidEventError(f"{fork} waits for {request_id}, but not it alone, or is not live")
        if (leader := live.leader) is not None and all(fork is not live for fork in leader.forks):
            raise InvalidEventError(f"request {request_id} waits for {leader}, which does not know")
        for segment in live.view().shared.segments:
            if not live.placement.holds(segment):
                raise InvalidEventError(f"request {request_id} shares {segment}, but does not hold it")
    for shared in _families(books):
        if unknown := shared.holder_ids - books.requests.keys():
            raise InvalidEventError(f"requests {sorted(unknown)} share KV, but are not live")


def _families(books: Books) -> tuple[SharedKV, ...]:
    kept = {id(live.shared): live.shared for live in books.requests.values() if live.shared is not None}
    return tuple(kept.values())


def _check_batches(books: Books) -> None:
    at_instances = {i: n for n, b in books.batches.items() for i in b.plan.group.instance_ids}
    for instance_id, instance in books.instances.items():
        if instance.batch_id != at_instances.pop(instance_id, None):
            raise InvalidEventError(f"{instance} does not fit the batches in flight")
    if at_instances:
        raise InvalidEventError(f"batches run on instances {sorted(at_instances)}, which do not exist")
    at_requests = {r: n for n, b in books.batches.items() for r in b.request_ids}
    for request_id, live in books.requests.items():
        if live.batch_id != at_requests.pop(request_id, None):
            raise InvalidEventError(f"request {request_id} says it is in batch {live.batch_id}; it is not")
    if at_requests:
        raise InvalidEventError(f"batches run requests {sorted(at_requests)}, which are not live")
    ending = {r: n for n, b in books.ending.items() for r in b.request_ids}
    named = {r: live.ending_id for r, live in books.requests.items() if live.ending_id is not None}
    if named != ending:
        raise InvalidEventError(f"requests {ending} are in batches that are ending, but they name {named}")


def _check_migrations(books: Books) -> None:
    named = {(migration_id, m.segment.owner_id) for migration_id, m in books.migrations.items()}
    kept = {(migration_id, r) for r, live in books.requests.items() for migration_id in live.migration_ids}
    if named != kept:
        raise InvalidEventError(f"migrations {sorted(named)} are in flight, but requests name {sorted(kept)}")


def _check_room(books: Books) -> None:
    used: Counter[InstanceId] = Counter()
    for live in books.requests.values():
        used.update(live.placement.tokens_by_instance())
    for segment in (s for batch in books.batches.values() for s in batch.plan.writes):
        used[segment.instance_id] += len(segment.positions)
    for migration in books.migrations.values():
        used[migration.destination_id] += len(migration.segment.positions)
    for shared in _families(books):
        used.subtract(shared.num_saved)
    for instance_id, instance in books.instances.items():
        if instance.kv_used != used.pop(instance_id, 0) or instance.kv_free < 0:
            raise InvalidEventError(f"{instance} does not use what its requests have there")
    if used:
        raise InvalidEventError(f"KV is on instances {sorted(used)}, which do not exist")


def _check_bounds(books: Books) -> None:
    full = [instance for instance in books.instances.values() if instance.kind is InstanceKind.FULL]
    if books.free != {i.instance_id: i.kv_free for i in full}:
        raise InvalidEventError(f"the slots {books.free} are not those that are free of {full}")
    if books.pools != {i.instance_id: i.kv_capacity for i in full}:
        raise InvalidEventError(f"the pools {books.pools} are not those of {full}")
    for request_id, live in books.requests.items():
        if live.view().num_final_tokens > books.most_tokens:
            raise InvalidEventError(
                f"no request comes to more than {books.most_tokens} tokens, but {request_id} does"
            )
