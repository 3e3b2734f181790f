"""What each field of a request body means, in one line: its unit, its default where the default is no value. Pure.

By name, or by class and name where one name means two things; a class's own line stands under its name. Types,
ranges, lengths and defaults are read from the declarations in `openai/schema` and never repeated here. A field
without a line fails `tests/coordinator/test_openapi.py`.
"""

from __future__ import annotations

from typing import Final

WORDS: Final[dict[str, str]] = {
    "ChatFields": "A conversation to go on with. min_tokens may not be more than the answer may have; top_logprobs "
    "above 0 needs logprobs, stream_options needs stream.",
    "TextFields": "A text to go on with. min_tokens may not be more than the answer may have; stream_options needs "
    "stream, max_tokens 0 needs echo.",
    "ChatMessage": "One message. Role tool needs its tool_call_id. Only role assistant may have tool_calls, and then "
    "need not have content.",
    "StreamOptions": "What a stream carries beside its text.",
    "TextPart": "A part of a message's content; parts are joined by line breaks.",
    "TextPart.type": "Which kind of part; both mean text.",
    "text": "The text of the part.",
    # Who and what
    "model": "Name of a served model, as /v1/models lists it.",
    "messages": "The conversation so far, oldest first; the model's chat template makes one prompt of it.",
    "role": "Who speaks. developer is another word for system.",
    "content": "The text of the message, as a string or as text parts.",
    "ChatMessage.name": "Name of the speaker, for templates that show it.",
    "tool_call_id": "Which call a message of role tool answers.",
    "tool_calls": "Calls that the assistant made in this message.",
    "add_generation_prompt": "Whether the prompt ends in the beginning of the assistant's message. Absent: yes, unless "
    "continue_final_message.",
    "continue_final_message": "Goes on with the last message, which must be plain text, where it ends. Not together "
    "with add_generation_prompt.",
    "chat_template_kwargs": "More names for the chat template, such as enable_thinking; none that the server sets, and "
    "none that ends in _token. At most 16 KiB of JSON.",
    # Of workers
    "DrainFields": "How a worker is to be drained. Without a body, or with {}, everything is at its default.",
    "RoleFields": "Which role a worker is to have, and how it is to be drained for that.",
    "RoleFields.role": "The role to come back in. The only decode worker that takes requests keeps its own.",
    "deadline_s": "Seconds for what runs on the worker; what has not ended by then goes on at another worker. Asked "
    "again, the earlier deadline counts.",
    # Token ids
    "TokenizeFields": "A text or a chat: either prompt or messages, and only with messages what its template takes.",
    "TokenizeFields.prompt": "The text.",
    "TokenizeFields.model": "Name of a served model. Absent: the one that is served.",
    "add_special_tokens": "Whether the tokenizer's own special tokens are added. Absent: to a text, not to a chat, "
    "whose template writes them.",
    "return_token_strs": "Whether each token comes as the vocabulary spells it, too.",
    "TokenizeFields.tools": "Functions that the template is told of.",
    "DetokenizeFields": "Token ids whose text is wanted.",
    "DetokenizeFields.model": "Name of a served model. Absent: the one that is served.",
    "tokens": "The token ids.",
    # Tools
    "ToolFields": "One tool that the model may call.",
    "FunctionFields": "A function of the client's.",
    "NamedChoice": "A call of one function, by its name.",
    "ChosenFunction": "The function that is to be called.",
    "CallFields": "A call that the assistant made.",
    "CalledFunction": "The function that was called, and with what.",
    "type": "Only functions are served.",
    "function": "The function.",
    "name": "Name of the function.",
    "id": "Name of the call, which the message that answers it repeats.",
    "FunctionFields.description": "What the function does, for the model.",
    "parameters": "JSON schema of the function's arguments, which are an object. Absent: it takes none.",
    "FunctionFields.strict": "Arguments fit the schema whenever a call is forced, with or without this; they are not "
    "bound otherwise.",
    "arguments": "The arguments as the model wrote them, a JSON object as a string where it did not err. Empty: none.",
    "tools": "Functions that the model may call, each name once. At most 256 KiB of JSON.",
    "tool_choice": "none: no call. auto: the model decides. required: at least one call. An object names the function "
    "to call. Absent: auto with tools, none without.",
    "parallel_tool_calls": "Whether one answer may hold several calls.",
    "prompt": "The text, as a string or as token ids, or a list of one kind of these: each prompt gets n choices, in "
    "the order of the prompts, and prompts times n may be at most 128.",
    "n": "How many answers to each prompt; they share the prompt's computation.",
    "best_of": "Known for its neutral value: the same as n.",
    "user": "Whom requests are counted for in the sharing between tenants, where no keys are set. Empty: nobody.",
    # How tokens are chosen
    "temperature": "Divides the logits before sampling; 0 always takes the most likely token.",
    "top_p": "Keeps the most likely tokens whose probabilities sum to this; 1 keeps all.",
    "top_k": "Keeps this many of the most likely tokens; -1 and 0 keep all.",
    "min_p": "Keeps tokens at least this fraction as likely as the most likely one; 0 keeps all.",
    "seed": "The same request with the same seed gives the same answer. Absent: a seed of its own each time.",
    "presence_penalty": "Taken from the logit of each token that the answer already has.",
    "frequency_penalty": "Taken from a token's logit for each time that the answer already has it.",
    "repetition_penalty": "Weakens the logits of tokens that prompt or answer already have; 1 leaves them.",
    "logit_bias": "Token id, written as a string, to what is added to its logit.",
    # How long, and when it ends
    "max_tokens": "Most tokens of the answer; prompt and answer must fit the context.",
    "ChatFields.max_tokens": "Most tokens of the answer; prompt and answer must fit the context. Absent: what fits. "
    "Without stream, all choices together have at most 1,048,576 tokens, or 262,144 log-probabilities.",
    "TextFields.max_tokens": "Most tokens of the answer; prompt and answer must fit the context. Absent: 16, or what "
    "fits. 0, with echo, shows the prompt alone. Without stream, all choices together have at most 1,048,576 tokens, "
    "or 262,144 log-probabilities.",
    "echo": "Each answer begins with the text of its prompt, and with logprobs with its log-probabilities too, which "
    "the first token has not. At most 8 MiB of text, or 262,144 log-probabilities, over all choices.",
    "max_completion_tokens": "The newer name of max_tokens; where both are given they must be equal.",
    "min_tokens": "Tokens of the answer before which nothing ends it.",
    "stop": "Strings that end the answer and are not part of it, each of at most 1,024 bytes of UTF-8.",
    "stop_token_ids": "Token ids that end the answer.",
    "ignore_eos": "Goes on after the model's own end tokens.",
    # What it must look like
    "ResponseFormat": "What the answer must look like. json_schema is there for type json_schema, and for that alone.",
    "response_format": "What the answer must look like; of the fields that say so, one may be given, and ignore_eos "
    "with none of them. JSON comes with one space after commas and colons and no other white space.",
    "ResponseFormat.type": "text asks for nothing, json_object for any JSON object.",
    "json_schema": "The schema that the answer is held to.",
    "JsonSchemaFormat": "A JSON schema with a name.",
    "JsonSchemaFormat.name": "A name for the schema; it changes nothing.",
    "JsonSchemaFormat.schema": "The schema. A keyword that answers cannot be held to is refused by name.",
    "description": "What the schema is for; it changes nothing.",
    "strict": "Changes nothing: answers are always held to the whole schema.",
    "StructuredOutputs": "What the answer must look like, as vLLM spells it: exactly one of json, regex, choice, "
    "grammar and json_object.",
    "structured_outputs": "What the answer must look like, as vLLM spells it.",
    "json": "A JSON schema, as an object or as its text.",
    "regex": "A regular expression that the whole answer matches.",
    "choice": "Texts of which the answer is one.",
    "grammar": "A grammar in Lark, as llguidance takes it, without %json, %regex, %llguidance, tokens and @.",
    "json_object": "Whether the answer is any JSON object.",
    "guided_json": "An older name of structured_outputs.json.",
    "guided_regex": "An older name of structured_outputs.regex.",
    "guided_choice": "An older name of structured_outputs.choice.",
    "guided_grammar": "An older name of structured_outputs.grammar.",
    # What comes back
    "stream": "Sends the answer as it is made, as server-sent events that end in `data: [DONE]`.",
    "stream_options": "Only with stream.",
    "include_usage": "One more event at the end of the stream, with the counts of tokens.",
    "ChatFields.logprobs": "Whether each token of the answer comes with its log-probability.",
    "top_logprobs": "How many of the most likely tokens are listed beside each token; above 0 it needs logprobs.",
    "TextFields.logprobs": "How many of the most likely tokens are listed, with their log-probabilities, beside each "
    "token of the answer and its own. Absent: no log-probabilities.",
    # How it is served
    "priority": "Added to the tier's class: lower is served first. A tier has bounds for it; below 0 is mostly refused "
    "where a service has several keys or tiers.",
    "service_tier": "Which tier serves the request, with that tier's time targets; auto is the tier of the API key, "
    "if that has one; default is the default tier.",
    "cache_salt": "Prompts share cached prefixes only with prompts of the same salt.",
}
