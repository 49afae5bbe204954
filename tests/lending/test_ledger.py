"""The debt ledger."""

from loong.lending.ledger import Debt, DebtLedger, LoanReason, candidates


def test_a_debt_keeps_its_first_time_and_reason_and_goes_with_its_last_block() -> None:
    ledger = DebtLedger().with_debt(Debt("r", 0, 1, 4, 2.0, LoanReason.FULL))
    ledger = ledger.with_debt(Debt("r", 0, 1, 6, 3.0)).with_debt(Debt("r", 0, 2, 1, 3.0))
    first = ledger.debts["r", 1]
    assert (first.num_blocks, first.since, first.reason) == (6, 2.0, LoanReason.FULL)
    assert str(first) == (
        "instance 1 keeps 6 blocks of request r for instance 0 since 2 s: its own memory was full"
    )
    assert ledger.blocks == {(0, 1): 6, (0, 2): 1}
    assert ledger.with_debt(Debt("r", 0, 1, 0, 4.0)).blocks == {(0, 2): 1}


def test_an_instance_that_is_lost_owes_and_is_owed_nothing() -> None:
    debts = [Debt("a", 0, 1, 1, 0.0), Debt("b", 1, 2, 1, 0.0), Debt("c", 2, 0, 1, 0.0)]
    ledger = DebtLedger()
    for debt in debts:
        ledger = ledger.with_debt(debt)
    assert ledger.without(1).blocks == {(2, 0): 1}


def test_candidates_are_near_before_they_are_roomy() -> None:
    rooms = {0: 50, 1: 10, 2: 40, 3: 90, 4: 0}
    assert candidates(0, rooms, lambda i: float(i > 2)) == (2, 1, 3)
