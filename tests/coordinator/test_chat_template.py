from __future__ import annotations

import json
import re
from typing import Any

import pytest

from common.errors import BadRequest, ModelCannotBeLoaded
from coordinator import chat_template
from coordinator.chat_template import ChatTemplate, TookTooLong
from coordinator.openai.messages import Chat

MESSAGES = [{"role": "user", "content": "hi"}]
HI = Chat(MESSAGES)


def test_blocks_take_their_line_with_them() -> None:
    source = "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source, {}).render(HI) == "[hi]\n"


def test_what_templates_on_the_hub_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}{{ add_generation_prompt }}{{ tools is none }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(
        Chat([{"role": "user", "content": "<é>"}, *MESSAGES])
    )
    assert rendered == '<s>{"role": "user", "content": "<é>"}20TrueTrue'


def test_the_log_of_a_failure_names_the_line_and_quotes_no_message(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate("{% for m in messages %}\n{{ {}[m['content']].x }}{% endfor %}", {})
    with pytest.raises(BadRequest):
        template.render(Chat([{"role": "user", "content": "SECRET"}]))
    assert "UndefinedError in line 2" in caplog.text and "SECRET" not in caplog.text


def test_a_refusal_keeps_its_reason() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        template.render(HI)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BadRequest) as refused:
        rendered = ChatTemplate(source, {}).render(HI)
        assert "class" in rendered  # never reached
    assert "Traceback" not in refused.value.message


def test_a_template_that_does_not_compile_is_found_at_start() -> None:
    with pytest.raises(ModelCannotBeLoaded, match="does not compile"):
        ChatTemplate("{% for %}", {})


def rendered(source: str, messages: list[dict[str, Any]] = MESSAGES, **more: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Chat(messages, **more))


def test_names_of_the_client_reach_the_template() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ style.name }}{{ missing is defined }}"
    assert rendered(source, kwargs={"enable_thinking": False, "style": {"name": "é"}}) == "<s>FalseéFalse"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(n) %}{% for j in range(n) %}{{ messages[0].role }}{% endfor %}{% endfor %}",
        "{% for i in range(n) %}{% for j in range(n) %}{% set x = i + j %}{% endfor %}{% endfor %}",
        "{% for i in range(n) %}{% for j in range(n) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'x' * (n * n) }}",
        "{{ [0] * (n * n) }}",
        "{% set ns = namespace(x='x') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 10 ** (n * n) }}",
        "{{ '%*d' % (n * n, 1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_does_not_end_or_grows_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100_000)
    with pytest.raises(BadRequest) as refused:
        rendered(source, kwargs={"n": 30_000})
    assert (refused.value.status, refused.value.code) == (400, "chat_template_failed")


def test_output_without_a_look_up_is_counted_and_what_is_to_be_quick_ends_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate(
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", {}
    )
    with pytest.raises(TookTooLong):
        template.render(HI, quick=True)
    monkeypatch.setattr(chat_template, "MAX_STEPS", 50_000)
    with pytest.raises(BadRequest):
        template.render(HI)


def test_counting_begins_anew_with_each_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 5000)
    template = ChatTemplate("{% for i in range(1000) %}{{ messages[0].role }}{% endfor %}", {})
    for _ in range(10):
        template.render(HI)


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_a_template_with_a_place_for_tools_gets_them() -> None:
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }};{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.has_place_for_tools
    assert template.render(Chat(MESSAGES, [TOOL])) == json.dumps([TOOL]) + "user;"


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain", {}, "{{ tools | tojson }}")
    assert template.has_place_for_tools
    assert template.render(HI) == "plain"
    assert template.render(Chat(MESSAGES, [TOOL])) == json.dumps([TOOL])


@pytest.mark.parametrize(
    ("system", "messages", "roles"),
    [
        (True, MESSAGES, ["system", "user"]),
        (True, [{"role": "system", "content": "Be brief."}, *MESSAGES], ["system", "user"]),
        (False, MESSAGES, ["user"]),
    ],
)
def test_tools_without_a_place_are_told_where_the_template_lets_them(
    system: bool, messages: list[dict[str, Any]], roles: list[str]
) -> None:
    refusal = "{{ raise_exception('no system role') if m.role == 'system' }}"
    body = "[{{ m.role }}]{{ m.content }}\n"
    template = ChatTemplate(
        "{% for m in messages %}" + ("" if system else refusal) + body + "{% endfor %}", {}
    )
    assert not template.has_place_for_tools
    text = template.render(Chat(messages, [TOOL]))
    assert re.findall(r"^\[(\w+)\]", text, re.MULTILINE) == roles
    assert json.dumps(TOOL) in text and "<tool_call>" in text and "hi" in text
    assert ("Be brief." in text) == (len(messages) > 1)
    assert template.render(Chat(messages)).count("\n") == len(messages)


def test_an_answer_goes_on_with_the_last_message() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    last = {"role": "assistant", "content": " hi and "}
    assert rendered(source, [*MESSAGES, last], continue_final_message=True) == "<user>hi</><assistant>hi and"
    kept = source.replace(" | trim", "")
    assert rendered(kept, [*MESSAGES, last], continue_final_message=True) == "<user>hi</><assistant> hi and "
    with pytest.raises(BadRequest, match="does not show"):
        rendered("nothing", [*MESSAGES, last], continue_final_message=True)
    assert rendered(source, add_generation_prompt=False) == "<user>hi</>"
