from loong.runs.report.policy_words import POLICY_WORDS, words_of
from loong.scheduler.policy import POLICIES
from loong.workloads.plots.style import POLICY_STYLES, styles_of


def test_every_policy_has_words_and_a_style_of_its_own() -> None:
    assert set(POLICY_WORDS) == set(POLICIES) == set(POLICY_STYLES)


def test_fixed_groups_of_any_size_have_words_and_a_style() -> None:
    assert words_of(["esp-fixed-4"]) == "esp-fixed-4: esp's order and chunks on fixed groups of 4."
    styles = styles_of(["esp-fixed-1", "esp-fixed-2", "esp-fixed-2 (simulated)", "esp", "infinite"])
    assert len(set(styles.values())) == 5


def test_those_that_nobody_knows_are_passed_over() -> None:
    assert words_of(["tp", "http://server"]) == "tp: one instance of all devices."
    assert words_of(["http://server"]) == ""
