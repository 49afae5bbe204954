"""The families that can be served."""

from typing import Final

from loong.model.families.family import Family
from loong.model.families.gemma3_text import GEMMA3
from loong.model.families.gpt_oss import GPT_OSS
from loong.model.families.granite import GRANITE
from loong.model.families.llama import LLAMA
from loong.model.families.mistral import MISTRAL
from loong.model.families.mixtral import MIXTRAL
from loong.model.families.qwen2 import QWEN2
from loong.model.families.qwen3 import QWEN3
from loong.model.families.qwen3_moe import QWEN3_MOE

FAMILIES: Final[dict[str, Family]] = {
    family.architecture: family
    for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GRANITE, GEMMA3, GPT_OSS)
}
GGUF_FAMILIES: Final[dict[str, Family]] = {
    family.gguf_architecture: family for family in FAMILIES.values() if family.gguf_architecture is not None
}
