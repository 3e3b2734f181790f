"""The OpenAPI document as one page of HTML that needs no script and nothing from elsewhere. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

Schema = Mapping[str, Any]

REF: Final = "#/components/schemas/"
HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem }
body { color: #1a1a1a; background: #fff }
pre, code { font-family: ui-monospace, monospace; font-size: .9em }
pre { background: #f2f2f2; padding: .8rem; overflow-x: auto }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { text-align: left; vertical-align: top; border-top: 1px solid #ccc; padding: .25rem .6rem .25rem 0 }
h2 { border-top: 2px solid #1a1a1a; padding-top: .5rem; margin-top: 2.5rem }
a { color: #0b57d0 }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616 } pre { background: #262626 } a { color: #8ab4f8 }
  h2 { border-color: #e6e6e6 } th, td { border-color: #444 }
}
</style>
</head>
<body>"""
RANGES: Final = (
    ("minimum", "maximum", "{}"),
    ("minLength", "maxLength", "{} characters"),
    ("minItems", "maxItems", "{} entries"),
    ("minProperties", "maxProperties", "{} entries"),
)


def page(document: Schema) -> str:
    """`document` as `openapi.document` makes it."""
    info = document["info"]
    operations = [
        (path, method, said) for path, item in document["paths"].items() for method, said in item.items()
    ]
    schemas = document["components"]["schemas"]
    return "\n".join(
        [
            HEAD.replace("@title", _text(f"{info['title']} API")),
            f"<h1>{_text(info['title'])} {_text(info['version'])}: the API</h1>",
            *(f"<p>{_text(part)}</p>" for part in info["description"].split("\n\n")),
            _how_to_call(document),
            "<h2 id='routes'>Routes</h2>",
            _table("All routes", ("Route", "What it does"), (_route_row(*each) for each in operations)),
            *(_operation(document, *each) for each in operations),
            "<h2 id='objects'>Objects</h2>",
            *(_object(name, schema) for name, schema in schemas.items()),
            "</body>\n</html>\n",
        ]
    )


def _how_to_call(document: Schema) -> str:
    lines = ["URL=http://127.0.0.1:8000"]
    said = "The examples call the server by its address"
    if "security" in document:
        lines.append("KEY=your-key")
        said += " and with your key"
    return f"<p>{said}:</p>\n<pre>{_text(chr(10).join(lines))}</pre>"


# ---------------------------------------------------------------- routes


def _route_row(path: str, method: str, said: Schema) -> tuple[str, str]:
    return f"<a href='#{said['operationId']}'><code>{method.upper()} {_text(path)}</code></a>", _text(
        said["summary"]
    )


def _operation(document: Schema, path: str, method: str, said: Schema) -> str:
    parts = [
        f"<h2 id='{said['operationId']}'><code>{method.upper()} {_text(path)}</code></h2>",
        f"<p>{_text(said['summary'])}.</p>",
        f"<pre>{_text(_curl(document, path, said))}</pre>",
        _table(
            "Path and headers",
            ("Name", "Where", "Meaning"),
            ((_code(one["name"]), one["in"], _text(one["description"])) for one in said["parameters"]),
        ),
    ]
    if "requestBody" in said:
        body = said["requestBody"]
        name = _name(body["content"]["application/json"]["schema"])
        parts += [
            f"<p>{_text(body['description'])}</p>",
            _fields(name, document["components"]["schemas"][name]),
        ]
    rows = (_answer_row(document, status, answer) for status, answer in said["responses"].items())
    parts.append(_table("Answers", ("Status", "When", "Body"), rows))
    return "\n".join(parts)


def _curl(document: Schema, path: str, said: Schema) -> str:
    words = [f'curl "$URL{path}"']
    if said.get("security", document.get("security")):
        words.append('-H "Authorization: Bearer $KEY"')
    if "requestBody" in said:
        example = said["requestBody"]["content"]["application/json"]["example"]
        quoted = json.dumps(example).replace("'", "'\\''")
        words += ["-H 'Content-Type: application/json'", f"-d '{quoted}'"]
    return " \\\n  ".join(words)


def _answer_row(document: Schema, status: str, answer: Schema) -> tuple[str, str, str]:
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rsplit("/", 1)[1]]
    kinds = []
    for media, content in answer["content"].items():
        kinds.append(f"{_code(media)}: {_event(content['schema']) or _type(content['schema'])}")
    return status, _text(answer["description"]), "<br>".join(kinds)


def _event(schema: Schema) -> str:
    """What the data of each event is; empty where the schema is not one of events."""
    kinds = schema.get("properties", {}).get("data", {}).get("anyOf", ())
    return " or ".join(_type(kind.get("contentSchema", kind)) for kind in kinds)


# ---------------------------------------------------------------- objects


def _object(name: str, schema: Schema) -> str:
    if "properties" not in schema:
        return f"<h3 id='{name}'>{name}</h3>\n<p>{_type(schema)}</p>"
    return (
        f"<h3 id='{name}'>{name}</h3>\n<p>{_text(schema.get('description', ''))}</p>\n{_fields(name, schema)}"
    )


def _fields(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (
            _code(field) + (" (required)" if field in required else ""),
            _type(said),
            _code(json.dumps(said["default"])) if "default" in said else "",
            _text(said.get("description", "")),
        )
        for field, said in sorted(schema["properties"].items(), key=lambda item: item[0] not in required)
    ]
    return _table(f"Fields of {name}", ("Field", "Type", "Default", "Meaning"), rows)


def _type(schema: Schema) -> str:
    """In words, as HTML."""
    if "$ref" in schema:
        name = _name(schema)
        return f"<a href='#{name}'>{name}</a>"
    if "const" in schema:
        return _code(json.dumps(schema["const"]))
    if "enum" in schema:
        return " or ".join(_code(json.dumps(value)) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(branch) for branch in schema["anyOf"])
    kinds = schema.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    said = " or ".join(_kind(kind, schema) for kind in kinds if kind != "null")
    ranges = ", ".join(_ranges(schema))
    return " or ".join(
        filter(None, (f"{said} ({ranges})" if ranges else said, "null" if "null" in kinds else ""))
    )


def _ranges(schema: Schema) -> Iterator[str]:
    for key, words in (("exclusiveMinimum", "more than {}"), ("exclusiveMaximum", "less than {}")):
        if key in schema:
            yield words.format(schema[key])
    for low, high, words in RANGES:
        if low in schema and high in schema:
            yield words.format(f"{schema[low]} to {schema[high]}")
        elif low in schema:
            yield words.format(f"at least {schema[low]}")
        elif high in schema:
            yield words.format(f"at most {schema[high]}")
    if "pattern" in schema:
        yield f"as {_code(schema['pattern'])}"


def _kind(kind: str, schema: Schema) -> str:
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).removeprefix(REF)


# ---------------------------------------------------------------- HTML


def _table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th scope='col'>{one}</th>" for one in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{caption}</caption>\n<tr>{head}</tr>\n{body}\n</table>"


def _text(words: str) -> str:
    return escape(words)


def _code(words: str) -> str:
    return f"<code>{escape(words)}</code>"
