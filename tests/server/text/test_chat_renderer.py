"""A hostile chat template ends no server, and holds up no other conversation."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from loong.core.errors import ConfigError, InvalidRequestError
from loong.server.api.errors import ApiError
from loong.server.text.chat_renderer import MAX_WAITING_BYTES, ChatRenderer, try_templates
from loong.server.text.chat_template import MAX_BYTES, ChatTemplate

IN_ITS_LOOP = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
ENDLESS = [
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{{ 9999 ** 9999 ** 9999 }}",
    "{{ lipsum(n=9999999) }}",
    "{% macro f(n) %}{% for i in range(2) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}{{ f(60) }}",
]
LARGE = [
    "{{ '%02000000000d' % 1 }}",
    "{{ '%02000000000d' % messages | length }}",
    "{{ messages[0].content.ljust(2000000000) }}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ messages | batch(10**9, 'a') | list }}",
    "{{ {'a' * 10**9: 1} | xmlattr }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ 'a'.join(range(99999) | map('string') | list * 99999) }}",
    "{% set ns = namespace(a='a') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ '{:>2000000000}'.format(1) }}",
    "{{ strftime_now('%Y' * 10**9) }}",
]
REFUSED = [
    "{{ raise_exception('no' * 10**6) }}",
    "{{ raise_exception(messages * 10**5) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include 'a' %}",
    "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "{{ '\\ud800' }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0]['content'].__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__html__ = 'a'.format %}{{ ns | escape }}",
    "{{ namespace({'_a': 1}) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 1 / 0 }}",
    "{{ messages | no_such_filter }}",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer() -> AsyncIterator[ChatRenderer]:
    renderer = ChatRenderer()
    yield renderer
    await renderer.close()


async def error_of(renderer: ChatRenderer, source: str) -> str:
    with pytest.raises(InvalidRequestError, match="chat template refuses these messages: ") as refused:
        await renderer.render(ChatTemplate(source, {}).request(HI))
    assert refused.value.param == "messages"
    return str(refused.value)


@IN_ITS_LOOP
@pytest.mark.parametrize("source", LARGE)
async def test_a_template_has_little_memory(renderer: ChatRenderer, source: str) -> None:
    error = await error_of(renderer, source)
    assert "it takes too much memory" in error or "it writes more than 67108864 characters" in error


@IN_ITS_LOOP
@pytest.mark.parametrize("source", REFUSED)
async def test_an_error_of_a_template_is_told_in_few_words(renderer: ChatRenderer, source: str) -> None:
    assert len(await error_of(renderer, source)) < 1100


@pytest.mark.parametrize("source", ENDLESS)
async def test_conversations_do_not_wait_for_one_that_never_ends(source: str) -> None:
    renderer = ChatRenderer(max_seconds=1.0)
    quick = ChatTemplate("{{ messages[0].content }}", {}).request(HI)
    hostile = asyncio.gather(*(error_of(renderer, source) for _ in range(6)))
    texts = await asyncio.gather(*(renderer.render(quick) for _ in range(20)))
    assert texts == ["hi"] * 20
    assert not hostile.done()
    assert all("it takes more than 1 s" in error for error in await hostile)
    await renderer.close()


async def test_chats_that_would_fill_memory_are_refused_until_others_are_written() -> None:
    renderer = ChatRenderer()
    template = ChatTemplate("{{ messages[0].content | length }}", {})
    large = template.request([{"role": "user", "content": "a" * (MAX_WAITING_BYTES // 3)}])
    answers = await asyncio.gather(*(renderer.render(large) for _ in range(3)), return_exceptions=True)
    (refused,) = [answer for answer in answers if isinstance(answer, ApiError)]
    assert refused.status == 503
    assert await renderer.render(large) == str(MAX_WAITING_BYTES // 3)
    await renderer.close()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages | no_such_filter }}", "does not compile: No filter named 'no_such_filter'"),
        (
            "{% for a in b %}" * 25 + "{% endfor %}" * 25,
            "does not compile: too many statically nested",
        ),
        ("{{ '%02000000000d' % 1 }}", "cannot be used: it takes too much memory"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "cannot be used: it writes more than"),
        ("{{ 9999 ** 9999 ** 9999 }}", "does not compile: it takes more than 0.5 s"),
    ],
)
async def test_a_template_that_no_conversation_can_use_is_named_at_the_start(source: str, why: str) -> None:
    fine, hostile = (ChatTemplate(text, {}) for text in ("{{ messages }}", source))
    with pytest.raises(ConfigError, match=f"the model's chat template {why}"):
        await try_templates([fine, hostile], max_seconds=0.5)


async def test_a_template_that_refuses_the_shortest_conversation_may_take_others() -> None:
    await try_templates([ChatTemplate("{{ raise_exception('begin with a system turn') }}", {}), None])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "does not compile: Expected an expression"),
        ("{{ " + "1" * 9999 + " }}", "does not compile: Exceeds the limit"),
        ("{{ " + "(" * 9999 + " }}", "does not compile: maximum recursion depth exceeded"),
        ("{{ a" + " + a" * 9999 + " }}", "does not compile: maximum recursion depth exceeded"),
        ("a" * (MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes or more, but at most {MAX_BYTES} are allowed"),
    ],
)
def test_a_text_that_is_no_template_is_the_operators_error(source: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"the model's chat template {why}"):
        ChatTemplate(source, {})
