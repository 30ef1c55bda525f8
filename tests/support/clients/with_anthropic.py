"""Anthropic's package for Python."""

import json
import sys

import anthropic

url, key, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
whole = client.messages.create(model=model, **asked)
with client.messages.stream(model=model, **asked) as stream:
    streamed = stream.get_final_text()
try:
    client.messages.create(model="nobody", **asked)
except anthropic.NotFoundError as error:
    unknown = error.body["error"]["message"]
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "tokens": whole.usage.output_tokens,
            "stream": streamed,
            "counted": client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens > 0,
            "unknown": unknown,
        }
    )
)
