"""LiteLLM, as a proxy's users have it: one function for every provider."""

import json
import sys

import litellm

url, key, model = sys.argv[1:]
hello = [{"role": "user", "content": "hello"}]
to_openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "messages": hello, "max_tokens": 3}
to_anthropic = {**to_openai, "model": f"anthropic/{model}", "api_base": url}
whole = litellm.completion(**to_openai)
pieces = litellm.completion(**to_openai, stream=True)
try:
    litellm.completion(**{**to_openai, "model": "openai/nobody"}, num_retries=0)
except litellm.NotFoundError as error:
    unknown = str(error)
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "tokens": whole.usage.completion_tokens,
            "stream": "".join(piece.choices[0].delta.content or "" for piece in pieces),
            "messages": litellm.completion(**to_anthropic).choices[0].message.content,
            "unknown": unknown,
        }
    )
)
