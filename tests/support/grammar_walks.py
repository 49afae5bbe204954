"""Random walks through the tokens that a grammar allows."""

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import torch
from constraints import constraints_of

from loong.core.grammar import Grammar, GrammarKind
from loong.model.tiny import CONFIG, tiny_model
from loong.worker.sampling.grammar_constraints import ConstrainedRow, Constraints

STOPS = CONFIG.eos_token_ids
MAX_TOKENS = 2000


@cache
def constraints() -> Constraints:
    return constraints_of(tiny_model(Path(mkdtemp())), CONFIG.vocab_size)


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode())


def allowed(request_id: str, grammar: Grammar, output: list[int]) -> list[int]:
    ((words, _),) = constraints().allowed([ConstrainedRow(request_id, grammar, output, STOPS)])
    bits = (words.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    reported = bits.flatten()[: CONFIG.vocab_size].tolist()
    return [token_id for token_id, bit in enumerate(reported) if bit]


def random_output(grammar: Grammar, seed: int, last: bytes = b'}],"') -> bytes:
    """Return a walk through the tokens allowed. It hurries to the end, which comes by bytes of `last`."""
    chance = random.Random(seed)
    output: list[int] = []
    while True:
        tokens = allowed(f"{grammar.text}-{seed}", grammar, output)
        assert tokens, bytes(output)
        assert len(output) < MAX_TOKENS, bytes(output)
        endings = [token_id for token_id in (*STOPS, *last) if token_id in tokens]
        # Blanks would only make it long; the others begin what is no character, which grammars let pass.
        tedious = {*b" \n", 0xE0, 0xED, 0xF0, 0xF4}
        token_id = chance.choice(
            endings
            if endings and chance.random() < 0.6
            else [t for t in tokens if t not in tedious] or tokens
        )
        if token_id in STOPS:
            return bytes(output)
        output.append(token_id)
