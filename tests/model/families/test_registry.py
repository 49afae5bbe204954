"""A family is one module, which alone knows what files call it."""

import re
from pathlib import Path

import pytest

from loong.model.families.registry import FAMILIES, GGUF_FAMILIES

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "loong" / "model"
WITH_MODELS = {MODEL / "shapes.py", MODEL / "tiny.py"}  # which have sizes of certain models
ARCHITECTURE = re.compile(r"\w+ForCausalLM")


def named_in(path: Path) -> set[str]:
    return set(ARCHITECTURE.findall(path.read_text()))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_has_a_module_and_a_row_in_the_docs(architecture: str) -> None:
    family = FAMILIES[architecture]
    assert architecture in named_in(MODEL / "families" / f"{family.model_type}.py")
    (row,) = re.findall(rf"^\|`{architecture}`\|(.*?)\|", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    if family.gguf_architecture is not None:
        assert row == f"`{family.gguf_architecture}`"
        assert GGUF_FAMILIES[family.gguf_architecture] is family


def test_nothing_else_asks_for_a_family() -> None:
    others = [path for path in (ROOT / "loong").rglob("*.py") if path not in WITH_MODELS]
    assert MODEL / "transformer.py" in others
    naming = {path.parent.name for path in others if any(name in FAMILIES for name in named_in(path))}
    assert naming == {"families"}
