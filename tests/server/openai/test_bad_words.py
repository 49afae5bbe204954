import pytest
from sentence_piece import Kind, sentence_piece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from loong.server.api.errors import ApiError
from loong.server.openai.bad_words import bad_word_ids
from loong.server.text.tokenizer import Tokenizer


async def pieces(tokenizer: Tokenizer, *words: str) -> list[str]:
    found = await bad_word_ids(words, tokenizer, 400)
    return [" ".join(tokenizer.piece(token_id) for token_id in word) for word in found]


@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
async def test_words_of_sentence_piece_begin_with_their_mark(kind: Kind) -> None:
    tokenizer = Tokenizer(sentence_piece(kind))
    assert await pieces(tokenizer, "the", " cat", "the cat") == ["▁the", "▁cat", "▁the ▁cat"]
    assert await pieces(tokenizer, "</s>")  # a special token is one


async def test_byte_level_words_are_bad_with_and_without_a_blank() -> None:
    vocab = {piece: i for i, piece in enumerate(["a", "b", "Ġ", "Ġa", "ab"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert await pieces(tokenizer, "a", " a", "b", "ab") == ["a", "Ġa", "b", "ab"]  # " b" and " ab" have two


async def test_tokens_that_the_model_lacks_are_refused() -> None:
    tokenizer = Tokenizer(sentence_piece())
    with pytest.raises(ApiError, match="bad_words holds token id"):
        await bad_word_ids(["the"], tokenizer, 5)
