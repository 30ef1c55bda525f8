"""The clients that people have, the real packages, each in a process that knows an address, a key and a model."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.local.clients import modules_of_node, python_of_clients

CLIENTS = Path(__file__).parents[2] / "support" / "clients"
SAID = "qwen0 qwen1 qwen2 "
ALONE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false", "NO_PROXY": "*"}
"""Nothing but our server is to be asked anything."""


def command(script: str) -> list[str]:
    """What runs a client, and what it is told besides; skips the test where it is not installed."""
    if script.endswith(".sh"):
        programs, more = [shutil.which("bash"), shutil.which("curl")], []
        run = ["bash"]
    elif script.endswith(".mjs"):
        programs, more = [shutil.which("node"), modules_of_node() / "openai"], [str(modules_of_node())]
        run = ["node"]
    else:
        programs, more = [python_of_clients()], []
        run = [str(python_of_clients())]
    if any(program is None or not Path(program).exists() for program in programs):
        pytest.skip(f"{script}: its client is not installed; python -m deploy.local.clients does it")
    return [*run, str(CLIENTS / script), *more]


async def said_by(script: str, address: str, key: str) -> str:
    run, path, *more = command(script)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    client = await asyncio.create_subprocess_exec(
        run, path, address, key, "qwen", *more, stdout=-1, stderr=-1, env={**inherited, **ALONE}
    )
    said, wrong = await client.communicate()
    assert client.returncode == 0, wrong.decode()[-2000:]
    return said.decode()


def keys(folder: Path) -> Path:
    (folder / "keys").write_text("sesame ask\n")
    return folder / "keys"


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        "with_openai.py",
        "with_anthropic.py",
        "with_litellm.py",
        "with_langchain.py",
        "with_openai.mjs",
        "with_anthropic.mjs",
    ],
)
async def test_a_client_as_it_is_gets_answers_streams_and_errors_that_it_knows(served, tmp_path, script):
    command(script)
    async with served(api_keys_file=keys(tmp_path), key="sesame") as s:
        found: dict[str, Any] = json.loads((await said_by(script, s.server.address, "sesame")).splitlines()[-1])
        assert (found.pop("whole"), found.pop("stream"), found.pop("tokens")) == (SAID, SAID, 3)
        assert "`nobody` does not exist" in found.pop("unknown")
        others = {"models": ["llama", "qwen"], "responses": SAID, "messages": SAID, "batch": [SAID] * 2}
        others |= {"counted": True}
        assert found == {name: others[name] for name in found}
        with pytest.raises(AssertionError, match=r"401|Authentication"):
            await said_by(script, s.server.address, "wrong")


async def test_curl_gets_an_answer_a_stream_and_an_error(served, tmp_path):
    async with served(api_keys_file=keys(tmp_path), key="sesame") as s:
        answer, *stream, unknown = (await said_by("with_curl.sh", s.server.address, "sesame")).splitlines()
        assert json.loads(answer)["choices"][0]["message"]["content"] == SAID
        assert stream[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in stream[:-1]]
        assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == SAID
        assert "`nobody`" in json.loads(unknown)["error"]["message"]
