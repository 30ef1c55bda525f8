"""LangChain's chat model for OpenAI."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI

url, key, model = sys.argv[1:]
given = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0}
chat = ChatOpenAI(model=model, max_tokens=3, **given)
whole = chat.invoke("hello")
try:
    ChatOpenAI(model="nobody", **given).invoke("hello")
except openai.NotFoundError as error:
    unknown = error.body["message"]
print(
    json.dumps(
        {
            "whole": whole.content,
            "tokens": whole.usage_metadata["output_tokens"],
            "stream": "".join(piece.text for piece in chat.stream("hello")),
            "batch": [answer.content for answer in chat.batch(["hello", "hello"])],
            "unknown": unknown,
        }
    )
)
