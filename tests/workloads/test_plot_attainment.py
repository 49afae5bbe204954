from pathlib import Path

from loong.workloads.plot_attainment import plot_attainment


def test_a_panel_a_rule_names_every_policy(tmp_path: Path) -> None:
    curves = {
        "tight": {"esp": [(1.0, 0.99), (2.0, 0.9), (4.0, 0.3)], "my-own": [(1.0, 0.5)], "tp": []},
        "loose": {"esp": [(1.0, 1.0)]},
    }
    path = tmp_path / "attainment.svg"
    plot_attainment(curves, 0.9, [path])
    drawn = path.read_text()
    for words in ("tight", "loose", "esp", "my-own", "tp", "SLO attainment"):
        assert words in drawn
