"""A server whose xgrammar cannot be imported serves all that needs none, and says so of the rest."""

from pathlib import Path

import httpx
from broken_packages import broken_package
from served import served

SCHEMA = {"name": "it", "schema": {"type": "object"}}


def test_requests_with_a_schema_are_refused_and_the_log_says_so_at_the_first(tmp_path: Path) -> None:
    code = "raise ImportError('undefined symbol: _ZN3tvm\\nin two lines')"
    reason = "xgrammar cannot be imported: ImportError: undefined symbol: _ZN3tvm in two lines"
    variables = broken_package(tmp_path, "xgrammar", code)
    flags = ("--num-instances", "1", "--api-server-count", "2")
    with served(tmp_path, *flags, environment=variables) as server:
        for path, prompt in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            for kind in ({"type": "json_object"}, {"type": "json_schema", "json_schema": SCHEMA}):
                body = {**prompt, "response_format": kind}
                refused = httpx.post(f"{server.url}{path}", json=body, timeout=60)
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, "response_format")
                assert error["code"] == "unsupported_parameter"
                assert error["message"] == f"response_format: {reason}"
        lines = [line for line in server.log.splitlines() if "xgrammar" in line]
        assert 1 <= len(lines) <= 2  # one of each process that answers clients
        assert all(line.endswith(f"guided fields are refused: {reason}") for line in lines)
        answer = server.client.completions.create(model="loong-tiny", prompt="hi", max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
        assert "Traceback" not in server.log
