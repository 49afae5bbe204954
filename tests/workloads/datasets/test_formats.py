import json
import re
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.workloads.datasets.read import read_recording
from loong.workloads.metrics.prefix_hits import prefix_hits
from loong.workloads.request import RequestShape, TokenRun
from loong.workloads.workload import make_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00.0000000,10,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 915, "output_length": 26, "hash_ids": [0, 7]}

{"timestamp": 2500, "input_length": 600, "output_length": 1}
{"timestamp": 2600, "input_length": 600, "output_length": 0, "hash_ids": [0]}
"""
LEVAL = json.dumps(
    {"input": "word" * 500, "instructions": ["why " * 8, "how?"], "outputs": ["as " * 8, "so"]}
)
LVEVAL = json.dumps(
    {"input": "why?" * 5, "context": "word" * 900, "answers": ["as it is", "no"], "length": 900}
)
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "word" * 30}, {"value": "reply" * 16}]},
        {"id": "b", "conversations": [{"from": "human", "value": "word" * 30}]},
        {"id": "c", "conversations": [{"value": "hi"}, {"value": "word" * 30}]},
        {"id": "d", "conversations": [{"value": "字" * 40}, {"value": "word" * 7}, {"value": "more"}]},
    ]
)
SAVED = """{"arrival_time":0.25,"prompt":[[7,100],[9,20]],"num_output_tokens":30,"user":"a"}
{"arrival_time":1,"prompt":[[8,5]],"num_output_tokens":1}
"""
SESSION = """{"arrival_time":0,"prompt":[[7,100],[9,20]],"num_output_tokens":30,"turn":{"session_id":5,"number":0,"num_turns":2}}
{"arrival_time":1,"prompt":[[8,5]],"num_output_tokens":4,"turn":{"session_id":5,"number":1,"num_turns":2,"think_time":2.5}}
"""  # noqa: E501 - a line is a request

Sizes = list[tuple[float | None, list[int], int]]  # time, tokens of each run, tokens out


@pytest.mark.parametrize(
    ("text", "name", "rows"),
    [
        (AZURE, "Azure LLM trace", [(0.0, [374], 44), (4.314579, [396], 109)]),
        (AZURE_2024, "Azure LLM trace", [(0.0, [2162], 5), (0.007405, [2399], 6)]),
        (BURSTGPT, "BurstGPT trace", [(5.0, [472], 18), (118.5, [417], 276)]),
        (
            MOONCAKE,
            "Mooncake trace",
            [(0.0, [512, 512, 176], 52), (0.5, [512, 403], 26), (2.5, [600], 1)],
        ),
        (LEVAL, "L-Eval", [(None, [500, 8], 6), (None, [500, 1], 2)]),
        (LVEVAL, "LV-Eval", [(None, [905], 2)]),
        (SHAREGPT, "ShareGPT", [(None, [30], 20), (None, [30], 7)]),
        (SAVED, "loong's requests", [(0.25, [100, 20], 30), (1.0, [5], 1)]),
        (SESSION, "loong's requests", [(0.0, [100, 20], 30), (1.0, [100, 20, 30, 5], 4)]),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_format_is_known_by_its_first_line(
    tmp_path: Path, mark: str, text: str, name: str, rows: Sizes
) -> None:
    path = tmp_path / "file"
    path.write_text(mark + text, encoding="utf-8")
    recording = read_recording(path)
    assert recording.format == name
    assert [
        (row.time, [run.num_tokens for run in row.shape.prompt], row.shape.num_output_tokens)
        for row in recording.rows
    ] == rows


def test_mooncakes_prompts_share_the_blocks_whose_hash_ids_they_share(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(MOONCAKE)
    first, second, third = (row.shape.new_runs for row in read_recording(path).rows)
    assert first[0] == second[0]
    assert len({run.seed for run in (*first, *second[1:], *third)}) == 5


def test_mooncakes_blocks_of_one_hash_id_are_equal_tokens_at_every_seed_and_lengths_are_exact(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_text(MOONCAKE)
    drawn = {seed: make_workload(f"trace:{path}", 3, seed=seed) for seed in (0, 1)}
    for requests in drawn.values():
        first, second, third = (request.prompt_token_ids(10_000) for request in requests)
        assert [len(prompt) for prompt in (first, second, third)] == [1200, 915, 600]
        assert first[:512] == second[:512]
        assert first[512] != second[512]
        assert list(prefix_hits(request.shape for request in requests)) == [0, 512, 0]
    assert drawn[0][0].prompt_token_ids(10_000) != drawn[1][0].prompt_token_ids(10_000)


def test_levals_questions_share_their_document(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(f"{LEVAL}\n{LEVAL}\n")
    prompts = [row.shape.new_runs for row in read_recording(path).rows]
    assert [len({prompt[0] for prompt in pair}) for pair in (prompts[:2], prompts[2:], prompts)] == [1, 1, 2]
    assert len({prompt[1].seed for prompt in prompts}) == 4


def test_our_own_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(SAVED)
    first, second = read_recording(path).rows
    assert first.shape == RequestShape((TokenRun(7, 100), TokenRun(9, 20)), 30, "a")
    assert second.shape == RequestShape((TokenRun(8, 5),), 1, "")


def line_of(text: str, number: int, before: str, after: str) -> str:
    lines = text.splitlines()
    assert before in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(before, after)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (line_of(AZURE, 3, "396", "many"), "line 3: ContextTokens 'many' is no number of tokens"),
        (line_of(AZURE, 3, "109", "1.5"), "line 3: GeneratedTokens '1.5' is no number of tokens"),
        (line_of(AZURE, 2, "-11-", "-13-"), "line 2: TIMESTAMP '2023-13-16 18:15:46.6805900' is no time"),
        (line_of(AZURE, 3, ",109", ""), "line 3: there is no GeneratedTokens"),
        (line_of(BURSTGPT, 4, "118.5", "noon"), "line 4: Timestamp 'noon' is no number of seconds"),
        (line_of(BURSTGPT, 4, "417", "-1"), "line 4: Request tokens '-1' is no number of tokens"),
        (
            line_of(MOONCAKE, 2, "915", "500"),
            "line 2: 2 hash_ids, but an input_length of 500 has 1 blocks of 512",
        ),
        (line_of(MOONCAKE, 4, "2500", '"soon"'), "line 4: Expected `float`, got `str` - at `$.timestamp`"),
        (line_of(MOONCAKE, 4, "600", "0"), "line 4: Expected `int` >= 1 - at `$.input_length`"),
        (line_of(MOONCAKE, 5, "}", ""), "line 5: Input data was truncated"),
        (LEVAL + "\n" + LEVAL.replace('["as', '["no", "as'), "line 2: 2 instructions have 3 outputs"),
        (LVEVAL.replace('["as it is", "no"]', "[]"), "line 1: Expected `array` of length >= 1"),
        (SHAREGPT.replace('"value": "hi"', '"value": 3'), "entry 3: Expected `str`, got `int`"),
        (SHAREGPT.replace("}, {", "}\n, {", 2)[:-3], "line 3: Expecting"),
        (line_of(SAVED, 1, "user", "usr"), "line 1: Object contains unknown field `usr`"),
        (line_of(SAVED, 2, "[8,5]", "[8,0]"), "line 2: Expected `int` >= 1 - at `$.prompt[0][1]`"),
        (
            SESSION.replace('"number":1', '"number":2'),
            "line 2: turn 2 (from 0) is beyond the 2 turns of its session",
        ),
        (
            SESSION.replace('"session_id":5', '"session_id":6', 1),
            "line 2: the request before must be turn 0 of 2 of session 5, and is turn 0 of 2 of session 6",
        ),
        (
            SESSION.splitlines()[1],
            "line 1: the request before must be turn 0 of 2 of session 5, and is no turn",
        ),
        (SAVED + SESSION.splitlines()[1], "line 3: the request before must be turn 0 of 2 of session 5"),
        (SESSION.replace("2.5", "-2.5"), "line 2: Expected `float` >= 0.0 - at `$.turn.think_time`"),
        ("time,tokens\n1,2\n", "line 1: has the columns 'time', 'tokens'; the file is none of an Azure"),
        ('{"time": 1}\n', "line 1: has the keys 'time'; the file is none of an Azure LLM trace"),
        ("{time: 1}\n", "line 1: JSON is malformed"),
        ('{\n  "time": 1\n}\n', "line 1: Input data was truncated; the file is none of an Azure LLM trace"),
        ("", "line 1: is empty; the file is none of"),
        ("d,c,b,a,e,g,f,h\n", "line 1: has the columns 'd', 'c', 'b', 'a', 'e', 'g' and 2 more; the file"),
        (f"# {'a' * 99},  b\n", f"line 1: has the columns '# {'a' * 30}...', 'b'; the file is none of"),
        ("a" * 200_000, "line 1: field larger than field limit (131072); the file is none of"),
        ("[]", "has no request that can be sent"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "requests.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as error:
        read_recording(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv cannot be read: No such file"):
        read_recording(tmp_path / "nowhere.csv")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(SAVED)
    assert len(read_recording(path).rows) == 2
    path.write_text(SAVED + SAVED)
    assert len(read_recording(path).rows) == 4
