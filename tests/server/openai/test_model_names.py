"""Names by which requests may call the model."""

import pytest
from http_answers import error_of, events_of, get_json, post
from listening import BESIDE_ITS_ENGINE
from scripted_engine import ScriptedEngine, Serving

from loong.core.errors import ConfigError
from loong.server.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@BESIDE_ITS_ENGINE
async def test_a_model_of_several_names_answers_by_the_one_asked_for(serving: Serving) -> None:
    async with serving(ScriptedEngine(), other_model_names=("gpt", "org/other", "tiny")) as url:
        cards = (await get_json(url, "/v1/models"))["data"]
        assert [card["id"] for card in cards] == ["tiny", "gpt", "org/other"]
        assert (await get_json(url, "/v1/models/org/other"))["id"] == "org/other"
        for name, answered in ((None, "tiny"), ("tiny", "tiny"), ("gpt", "gpt"), ("org/other", "org/other")):
            whole = (await post(url, COMPLETIONS, model=name, prompt="a")).json()
            events = events_of(
                await post(url, CHAT, model=name, messages=MESSAGES, stream=True, max_tokens=2)
            )
            assert whole["model"] == answered
            assert {event["model"] for event in events} == {answered}
        error = await error_of(url, COMPLETIONS, 404, model="another", prompt="a")
        tokenized = await post(url, "/tokenize", model="gpt", prompt="a")
    assert (
        error["message"] == "the model 'another' does not exist; 'tiny' and 'gpt' and 'org/other' are served"
    )
    assert error["param"] == "model"
    assert tokenized.status_code == 200


@BESIDE_ITS_ENGINE
async def test_any_name_is_taken_if_the_server_says_so(serving: Serving) -> None:
    async with serving(ScriptedEngine(), accepts_any_model=True) as url:
        assert (await post(url, COMPLETIONS, model="gpt-9", prompt="a")).json()["model"] == "gpt-9"
        assert (await post(url, COMPLETIONS, prompt="a")).json()["model"] == "tiny"
        assert (await get_json(url, "/v1/models/gpt-9"))["id"] == "gpt-9"
        assert [card["id"] for card in (await get_json(url, "/v1/models"))["data"]] == ["tiny"]
        error = await error_of(url, COMPLETIONS, 400, model="x" * 257, prompt="a")
    assert error["param"] == "model"
    assert "257 characters, but at most 256" in error["message"]


def test_a_name_must_not_be_empty() -> None:
    with pytest.raises(ConfigError, match="--served-model-name must not be empty"):
        ServerSettings("tiny", other_model_names=("",))
