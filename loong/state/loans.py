"""Room that another engine gets of an instance, and its return."""

from loong.core.applied import UNPLANNED, Applied
from loong.core.events import RoomLent, RoomReturned
from loong.core.instructions import LendSlots, ReleaseKV
from loong.state.accounting import Accounting


def change_room(accounting: Accounting, event: RoomLent | RoomReturned) -> Applied:
    """Begin or end a loan."""
    return _lend(accounting, event) if isinstance(event, RoomLent) else _take_back(accounting, event)


def _lend(accounting: Accounting, event: RoomLent) -> Applied:
    """Take room from an instance if it is free. What is cached there makes way."""
    if not accounting.pools.lend(event.loan_id, event.instance_id, event.num_tokens):
        return UNPLANNED
    owners = accounting.requests.owners
    owners.make_room()
    lent = LendSlots(event.loan_id, event.instance_id, event.num_tokens)
    return Applied((*owners.take_instructions(), lent), needs_plan=False)


def _take_back(accounting: Accounting, event: RoomReturned) -> Applied:
    """Let an instance have the room of a loan again, unless it was lost or has left."""
    if (instance_id := accounting.pools.take_back(event.loan_id)) is None:
        return UNPLANNED
    return Applied((ReleaseKV(event.loan_id, (instance_id,)),))
