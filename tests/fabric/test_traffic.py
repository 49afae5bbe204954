from loong.fabric.traffic import Channel, Sent, Traffic


def test_the_difference_of_two_snapshots_is_what_was_sent_in_between() -> None:
    traffic = Traffic()
    traffic.count(Channel.RING, 10)
    before = traffic.snapshot()
    traffic.count(Channel.RING, 5)
    traffic.count(Channel.SEGMENT, 7)
    sent = traffic.snapshot() - before
    assert (sent[Channel.RING], sent[Channel.SEGMENT], sent[Channel.CONTROL]) == (
        Sent(1, 5),
        Sent(1, 7),
        Sent(),
    )
    assert sent.total == Sent(2, 12)
    assert before.total == Sent(1, 10)
