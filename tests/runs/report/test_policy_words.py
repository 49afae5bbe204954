from loong.runs.report.policy_words import POLICY_WORDS, words_of
from loong.scheduler.policy import POLICIES
from loong.workloads.plots.style import POLICY_STYLES, styles_of


def test_every_policy_has_words_and_a_style_of_its_own() -> None:
    assert set(POLICY_WORDS) == set(POLICIES) == set(POLICY_STYLES)


def test_policies_with_any_number_have_words_and_a_style() -> None:
    assert words_of(["esp-fixed-4"]) == "esp-fixed-4: esp's order and chunks on fixed groups of 4."
    assert words_of(["disaggregated-2", "esp-disaggregated-1"]) == (
        "disaggregated-2: every instance works alone, 2 only decode, and KV moves there; "
        "esp-disaggregated-1: esp's order and chunks, 1 only decode, and KV moves there."
    )
    styles = styles_of(
        [
            "disaggregated-1",
            "esp-disaggregated-1",
            "esp-disaggregated-2",
            "esp-fixed-1",
            "esp-fixed-2",
            "esp-fixed-2 (simulated)",
            "esp",
            "infinite",
        ]
    )
    assert len(set(styles.values())) == 8


def test_those_that_nobody_knows_are_passed_over() -> None:
    assert words_of(["tp", "http://server"]) == "tp: one instance of all devices."
    assert words_of(["http://server"]) == ""
