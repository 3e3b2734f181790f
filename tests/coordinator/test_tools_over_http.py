"""Tools through the whole front with scripted answers: what the template gets, and what becomes of calls."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Encoder

from common.request import unpack_ids
from coordinator.docs.openapi import Facts, document
from coordinator.door.front_door import ASGIApp
from coordinator.http_api import create_app
from coordinator.tokenizer import Tokenizer
from tests.coordinator.in_process import post
from tests.coordinator.schema_bodies import validator
from tests.coordinator.scripted_gateway import Script, ScriptedGateway

ROUTE = "/v1/chat/completions"
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
END = 2
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a place", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
CHAT: dict[str, Any] = {
    "model": "smol",
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
    "tools": [WEATHER, CLOCK],
}
CALLS = [("get_weather", '{"city": "Paris 😀 }"}'), ("get_time", "{}"), ("get_weather", '{"city": [1, {}]}')]

# As small as a template with a place for tools can be.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>{% endfor %}"
)
MARKERS: dict[str, list[str]] = {
    "told as text": [],  # the default model's template has no place for tools
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral, names": ["[TOOL_CALLS]", "[ARGS]"],
}


@dataclass(frozen=True, slots=True)
class House:
    family: str
    app: ASGIApp
    gateway: ScriptedGateway
    tokenizer: Tokenizer

    def ask(self, text: str, finish: str = "stop", group: int = 1, **fields: Any) -> dict[str, Any]:
        """The whole answer, when `text` is what the model writes. The streamed one is the same."""
        ids = self.tokenizer.encode_now(text) + ([END] if finish == "stop" else [])
        self.gateway.script = lambda _: Script(ids, finish=finish, group=group)  # type: ignore[arg-type]
        whole = asyncio.run(post(self.app, ROUTE, CHAT | fields)).json()
        chunks = asyncio.run(post(self.app, ROUTE, CHAT | fields | {"stream": True})).events()
        joined = joined_chunks(chunks, len(whole["choices"]))
        for one, other in zip(whole["choices"], joined, strict=True):
            assert without_ids(one) == other
        return whole

    def prompt(self) -> str:
        """What the model was last told."""
        ids = unpack_ids(self.gateway.requests[-1].prompt_ids)
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()


@pytest.fixture(scope="module", params=MARKERS)
def house(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    family = str(request.param)
    folder = tmp_path_factory.mktemp("model")
    for name in SMALL_FILES:
        shutil.copy(smollm2_dir / name, folder)
    if markers := MARKERS[family]:
        spoken = markers[0] if family == "hermes" else ""
        (folder / "chat_template.jinja").write_text(f"{{# {spoken} #}}{TEMPLATE}")
        encoder = Encoder.from_file(str(folder / "tokenizer.json"))
        encoder.add_special_tokens(markers)
        encoder.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 49_200}))
    gateway = ScriptedGateway()
    tokenizer = Tokenizer(folder)
    yield House(
        family,
        create_app(gateway, tokenizer, gateway.metrics, served_models=("smol",)),
        gateway,
        tokenizer,
    )
    tokenizer.close()


def written(family: str, calls: list[tuple[str, str]]) -> str:
    """Calls as the family writes them."""
    if family in ("hermes", "told as text"):
        texts = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    if family == "llama3_json":
        texts = (f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)
        return "<|python_tag|>" + "; ".join(texts)
    if family == "mistral, names":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    texts = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS][{', '.join(texts)}]"


def joined_chunks(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """The deltas of each choice put together, as a client does. No delta is empty, but the last one."""
    found = []
    for index in range(num_choices):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        first, *middle, last = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert last["delta"] == {} and last["finish_reason"]
        content = ""
        calls: list[dict[str, Any]] = []
        logprobs: list[Any] | None = [] if any(choice["logprobs"] for choice in choices) else None
        for choice in [*middle, last]:
            assert choice["finish_reason"] is None or choice is last
            if logprobs is not None and choice["logprobs"]:
                logprobs += choice["logprobs"]["content"]
            for key, value in choice["delta"].items():
                assert value
                if key == "content":
                    content += value
                else:
                    (delta,) = value
                    if delta["index"] == len(calls):
                        assert (delta["type"], delta["function"]["arguments"]) == ("function", "")
                        calls.append({"type": "function", "function": delta["function"]})
                    else:
                        assert delta["index"] == len(calls) - 1 and set(delta) == {"index", "function"}
                        assert delta["function"]["arguments"]
                        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        found.append(
            {
                "index": index,
                "content": (content or None) if calls else content,
                "calls": calls,
                "logprobs": logprobs,
                "finish_reason": last["finish_reason"],
            }
        )
    return found


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "index": choice["index"],
        "content": message["content"],
        "calls": [
            {"type": call["type"], "function": call["function"]} for call in message.get("tool_calls", [])
        ],
        "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
        "finish_reason": choice["finish_reason"],
    }


def called(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls", [])
    ]


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_calls(house: House, group: int) -> None:
    for count in (1, 2, 3):
        (choice,) = house.ask(written(house.family, CALLS[:count]), group=group)["choices"]
        assert called(choice) == CALLS[:count]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == count
        if "mistral" in house.family:
            assert all(len(id) == 9 and id.isalnum() for id in ids)
        else:
            assert all(id.startswith("call_") for id in ids)


def test_answers_with_calls_are_as_the_document_says(house: House) -> None:
    said = document(Facts(("smol",), ("default",), house.tokenizer.vocab_size, 8192, 1 << 20, 1.0, False))
    whole = house.ask(
        "Well. " + written(house.family, CALLS[:2]) if house.family != "llama3_json" else "Well."
    )
    chunks = asyncio.run(post(house.app, ROUTE, CHAT | {"stream": True})).events()
    validator(said, "ChatAnswer").validate(whole)
    for chunk in chunks:
        validator(said, "ChatChunk").validate(chunk)


def test_no_call_is_content(house: House) -> None:
    for text in (
        "Sunny, 20 °C. 😀",
        "",
        '{"city": "x"} <b>[1]</b> <tool',
        written(house.family, [("unknown", "{}")]),
    ):
        (choice,) = house.ask(text)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]


def test_cut_calls_show_what_there_is(house: House) -> None:
    whole = written(house.family, CALLS[:1])
    at = whole.index("Paris")
    (choice,) = house.ask(whole[:at], finish="length")["choices"]
    assert called(choice) == [("get_weather", '{"city": "')]
    assert choice["finish_reason"] == "length"


def test_one_call_where_only_one_is_wanted(house: House) -> None:
    (choice,) = house.ask(written(house.family, CALLS), parallel_tool_calls=False)["choices"]
    assert called(choice) == CALLS[:1]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_logprobs_are_those_of_every_token(house: House) -> None:
    text = written(house.family, CALLS[:2])
    (choice,) = house.ask(text, logprobs=True, top_logprobs=1)["choices"]
    raw = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert raw.decode() == text


def test_each_choice_has_its_own_calls(house: House) -> None:
    body = house.ask(written(house.family, CALLS[:2]), n=3)
    assert [called(choice) for choice in body["choices"]] == [CALLS[:2]] * 3
    ids = [call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6


def test_none_is_no_call_and_tells_of_no_tools(house: House) -> None:
    text = written(house.family, CALLS[:1])
    plain = text if not MARKERS[house.family] else None
    (choice,) = house.ask(text, tool_choice="none")["choices"]
    assert called(choice) == [] and choice["finish_reason"] == "stop"
    assert plain is None or choice["message"]["content"] == plain
    assert "get_weather" not in house.prompt()
    house.ask("x")
    assert "get_weather" in house.prompt() and "Of a place" in house.prompt()


def test_earlier_calls_and_their_answers_reach_the_model(house: House) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "20 degrees"}]},
        {"role": "tool", "tool_call_id": "b", "content": "sunny"},
    ]
    house.ask("x", messages=messages)
    prompt = house.prompt()
    assert "Paris" in prompt and "20 degrees" in prompt and "sunny" in prompt
    if house.family == "told as text":
        assert prompt.endswith(
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\n20 degrees\n</tool_response>\n<tool_response>\nsunny\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_a_forced_call_goes_to_the_workers_as_a_grammar(house: House) -> None:
    for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
        (answer,) = house.ask(written(house.family, CALLS[:2]), tool_choice=choice)["choices"]
        assert called(answer) == CALLS[: 1 if choice is NAMED else 2]
        assert answer["finish_reason"] == finish
        grammar = house.gateway.requests[-1].sampling.grammar
        assert grammar is not None and grammar.kind == "lark"
        assert ("get_time" in grammar.text) == (choice == "required")
    house.ask("x")
    assert house.gateway.requests[-1].sampling.grammar is None
    for marker in MARKERS[house.family]:  # where it ends an answer, no call could be written
        stop = [house.tokenizer.added_ids[marker]]
        reply = asyncio.run(
            post(house.app, ROUTE, CHAT | {"tool_choice": "required", "stop_token_ids": stop})
        )
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "stop_token_ids")


def test_a_forced_call_cut_anywhere_shows_nothing_of_its_wrapping(house: House) -> None:
    text = written(house.family, CALLS[:2])
    for end in range(len(text)):
        (answer,) = house.ask(text[:end], finish="length", tool_choice="required")["choices"]
        assert not answer["message"]["content"] and answer["finish_reason"] == "length"


def called_with(arguments: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


DEEP = '{"a": ' * 40 + "1" + "}" * 40


@pytest.mark.parametrize(
    "arguments", ['{"city": "New', "[]", "no JSON", DEEP, '{"a": ' * 978 + "1" + "}" * 978, '{"a": 1e999}']
)
def test_arguments_that_a_model_got_wrong_do_not_end_the_conversation(house: House, arguments: str) -> None:
    if house.family == "told as text":
        house.ask("x", messages=[{"role": "user", "content": "x"}, called_with(arguments)])
        assert json.dumps(arguments, ensure_ascii=False) in house.prompt()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tool_choice": "any"}, 400, "tool_choice"),
        ({"tool_choice": 1}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, 400, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, 400, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools"),
        ({"tools": [CLOCK] * 129}, 400, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, 400, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, 400, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            400,
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": "\ud800"}}}]},
            400,
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * (256 << 10)}}]},
            400,
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "other": 1}}]},
            422,
            "tools[0].function.other",
        ),
        ({"tools": [{"type": "custom"}]}, 422, "tools[0].type"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * (16 << 10)}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, 400, "chat_template_kwargs"),
        ({"tool_choice": "required", "ignore_eos": True}, 400, "ignore_eos"),
        ({"response_format": {"type": "json_object"}}, 422, "response_format"),
        (
            {
                "tools": [WEATHER | {"function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            400,
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    WEATHER | {"function": {"name": "a", "parameters": {"not": {}, "title": "x" * 70_000}}}
                ],
                "tool_choice": "required",
            },
            400,
            "tools",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message"),
    ],
)
def test_what_is_refused(client: httpx.Client, fields: dict[str, Any], status: int, param: str) -> None:
    for stream in (False, True):
        reply = client.post(ROUTE, content=json.dumps(CHAT | fields | {"stream": stream}))
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
