from loong.launcher.plot.policy_words import POLICY_WORDS, words_of
from loong.scheduler.policy import POLICIES
from loong.workloads.plot_style import POLICY_STYLES


def test_every_policy_has_words_and_a_style_of_its_own() -> None:
    assert set(POLICY_WORDS) == set(POLICIES) == set(POLICY_STYLES)


def test_those_that_nobody_knows_are_passed_over() -> None:
    assert words_of(["tp", "http://server"]) == "tp: one instance of all devices."
    assert words_of(["http://server"]) == ""
