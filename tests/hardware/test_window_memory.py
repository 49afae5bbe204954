"""The memory that fewer tokens in layers with a window leave for others."""

import pytest

from loong.core.errors import ConfigError
from loong.hardware import memory
from loong.hardware.memory import fit_kv_capacity, weight_bytes
from loong.model.shapes import SHAPES


@pytest.mark.parametrize(("name", "factor"), [("gpt-oss-20b", 2), ("gemma-3-27b", 6)])
def test_fewer_tokens_in_windows_leave_room_for_more_context(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: float
) -> None:
    config = SHAPES[name]
    layout = config.kv_layout()
    available = weight_bytes(config) + 10_000 * layout.bytes_per_token
    monkeypatch.setattr(memory, "_available_bytes", lambda: available)
    assert fit_kv_capacity(config, 1, 10_000) == 10_000
    most = int(10_000 * factor * 0.9)
    assert fit_kv_capacity(config, 1, most, window_tokens=100) == most
    with pytest.raises(ConfigError, match="would fit"):
        fit_kv_capacity(config, 1, int(10_000 * factor * 1.1), window_tokens=100)
