"""OpenAI's package for Python."""

import json
import sys

import openai

url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
hello = [{"role": "user", "content": "hello"}]
whole = client.chat.completions.create(model=model, messages=hello, max_tokens=3)
pieces = client.chat.completions.create(model=model, messages=hello, max_tokens=3, stream=True)
try:
    client.chat.completions.create(model="nobody", messages=hello)
except openai.NotFoundError as error:
    unknown = error.body["message"]
print(
    json.dumps(
        {
            "models": [each.id for each in client.models.list()],
            "whole": whole.choices[0].message.content,
            "tokens": whole.usage.completion_tokens,
            "stream": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
            "responses": client.responses.create(model=model, input="hello", max_output_tokens=3).output_text,
            "unknown": unknown,
        }
    )
)
