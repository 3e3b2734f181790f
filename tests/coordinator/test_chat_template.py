from __future__ import annotations

import pytest

from common.errors import BadRequest, ModelCannotBeLoaded
from coordinator.chat_template import ChatTemplate
from coordinator.openai_messages import Chat

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
