"""Why a body that fits the document may be refused all the same: what a JSON schema cannot say, as messages."""

from __future__ import annotations

BEYOND = (
    # Rules between two fields.
    r"^stream_options: needs stream to be true",
    r"^best_of: (is less than n|asks for choices to be thrown away)",
    r"^n: \d+ prompts with n = \d+ are more than 128 choices",
    r"^top_logprobs: needs logprobs to be true",
    r"^max_tokens: differs from max_completion_tokens",
    r"^max_tokens: is 0, which leaves nothing to answer",
    r"^logprobs: with echo that is \d+ log-probabilities",
    r"^min_tokens: \d+ is more than the \d+ tokens",
    r"^continue_final_message: (contradicts|needs)",
    r"^The body: needs either a prompt or messages",
    r"^(tools|add_generation_prompt|continue_final_message|chat_template_kwargs): goes with messages only",
    r"^tool_choice: (asks for a call, but|names a function that)",
    r"^tools: names the function",
    r"^chat_template_kwargs: may not set",
    # JSON written as a string.
    r"a form of the answer does not go with tools",
    r"^ignore_eos: cannot go with a forced call",
    r"^tools(\[0\].function.parameters)?: ",
    r"^messages\[\d+\]: a message of role tool needs its tool_call_id",
    r"[Tt]he context of this server is",
    r"^structured_outputs: takes exactly one of",
    r"^response_format: json_schema is there for type json_schema",
    r"asks for a form of the answer, and \w+ does too",
    r"^ignore_eos: cannot go with a form",
    r"^stop_token_ids: may hold special tokens only",
    # Languages of their own: JSON schemas, regular expressions, Lark.
    r"^(response_format\.json_schema\.schema|structured_outputs\.\w+|guided_\w+): ",
    # Bytes, where a schema counts characters.
    r"is longer than 1024 bytes",
    # Numbers written as strings, and what a template makes of a conversation.
    r"^logit_bias: .* is not a token id of this model",
    r"^messages: the chat template",
)
