import re
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.core.kv_layout import ELEMENT_BYTES, KVLayout, row_of_fp8_heads, row_of_heads

ROOT = Path(__file__).parents[2]
INSIDE = re.compile(r"2, K, D|row_of_heads|num_kv_heads")
# Folders and files that may know what is in a row: kernels, the model, and the costs of attention.
MAY_KNOW = (
    "kernels/",
    "loong/model/",
    "loong/core/kv_layout.py",
    "loong/core/cost/cuda_graph_limits.py",
    "loong/hardware/model_shape.py",
    "scheduler/cost/roofline.py",
)


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_bytes_are_those_of_all_elements_and_layers(dtype: str) -> None:
    layout = KVLayout(3, row_of_heads(2, 8), dtype)
    assert layout.row_bytes == 32 * ELEMENT_BYTES[dtype]
    assert layout.bytes_per_token == 3 * layout.row_bytes


def test_rows_in_fp8_have_a_byte_a_value_and_a_scale_for_each_key_and_value_of_a_head() -> None:
    layout = KVLayout(2, row_of_fp8_heads(8, 128), "uint8")
    assert layout.row_bytes == 2 * 8 * (128 + 4)


def test_layers_are_of_kinds_by_their_window() -> None:
    row = row_of_heads(1, 4)
    plain, mixed = KVLayout(3, row, "float32"), KVLayout(3, row, "float32", (64, None, 64))
    assert (plain.windows, [plain.window(layer) for layer in range(3)]) == ((None,), [None] * 3)
    assert (mixed.windows, [mixed.window(layer) for layer in range(3)]) == ((None, 64), [64, None, 64])
    assert KVLayout(2, row, "float32", (9, 9)).windows == (9,)


def test_rows_that_cannot_be_copied_by_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a multiple of 8 bytes, got 12: \[12\] of uint8"):
        KVLayout(1, (12,), "uint8")


def test_only_the_model_and_kernels_know_what_is_in_a_row() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("loong", "kernels", "scheduler", "launcher", "workloads")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {"loong/worker/kv/pool.py", "loong/attention/ring.py"} < sources.keys()
    knowing = [path for path, source in sources.items() if INSIDE.search(source)]
    assert [path for path in knowing if not path.startswith(MAY_KNOW)] == []
