"""Models that see and hear, in models.yaml from one moment to the next: the same answer at each door."""

import asyncio
import base64
import io
import uuid
import wave
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import pi, sin
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from schemas.requests import Endpoint
from service.models_file import ModelSpec
from service.ports import Call
from tests.support.checkpoints import make_hearing, make_vision
from tests.support.doors import Doors, open_doors, with_models

pytestmark = [pytest.mark.engine, pytest.mark.broker]

Body = dict[str, Any]


@pytest.fixture(scope="module")
async def doors(vllm_engine: Any, broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Doors]:
    """With two more models, until the tests are done."""
    folder = tmp_path_factory.mktemp("senses")
    llama = vllm_engine._models.models["llama"]

    def spec(alias: str, path: Path, **more: Any) -> ModelSpec:
        return replace(llama, alias=alias, engine_args={**llama.engine_args, "model": str(path), **more})

    folder = tmp_path_factory.mktemp("senses")
    seen = make_vision(folder / "seer", Path(llama.engine_args["model"]))
    seer = spec("seer", seen, allowed_media_domains=["localhost"])
    hearer = spec("hearer", make_hearing(folder / "hearer"), max_model_len=448)
    async with open_doors(vllm_engine, broker.bootstrap) as opened, with_models(opened, seer, hearer):
        yield opened


async def in_python(doors: Doors, endpoint: Endpoint, body: Body) -> Body:
    await doors.bus.switch(body["model"], hold=60)
    answer = await doors.engine.answer(Call(id=uuid.uuid4().hex, alias=body["model"], endpoint=endpoint, body=body))
    await doors.bus.switch(body["model"], hold=0)
    assert answer.status == 200, answer.body
    return dict(answer.body)


# --- pictures ---


def picture(colour: tuple[int, int, int]) -> str:
    """A data URL."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(url: str) -> Body:
    content = [{"type": "text", "text": "Who is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    return {"model": "seer", "messages": messages, "max_tokens": 16, "temperature": 0, "logprobs": True}


async def test_what_is_said_of_a_picture_hangs_on_the_picture_and_not_on_the_door(doors: Doors) -> None:
    heard = []
    for colour in ((255, 0, 0), (0, 80, 255)):
        body = shown(picture(colour))
        over_http = await doors.openai.chat.completions.create(**body)
        over_bus = await doors.bus.chat(**body)
        direct = (await in_python(doors, Endpoint.CHAT, body))["choices"]
        assert [choice.model_dump(exclude_unset=True) for choice in over_bus.choices] == direct
        assert [choice.model_dump(exclude_unset=True) for choice in over_http.choices] == direct
        heard.append(direct)
    assert heard[0] != heard[1]


@pytest.mark.long
async def test_pictures_survive_a_switch(doors: Doors) -> None:
    asked = shown(picture((0, 160, 0)))
    first = await doors.bus.chat(**asked)
    await doors.bus.switch("qwen")
    await doors.engine.park("seer")
    again = await doors.bus.chat(**asked)
    assert again.choices[0].message.content == first.choices[0].message.content


@asynccontextmanager
async def pictures() -> AsyncIterator[tuple[str, list[str]]]:
    """A site that has a picture, and sends who asks for ``/moved`` to the same picture; what it was asked for."""
    asked: list[str] = []
    png = base64.b64decode(picture((255, 0, 0)).partition(",")[2])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[1].decode())
        moved = asked[-1] == "/moved"
        status, more, body = ("302 Found", f"Location: {url}/inside", b"") if moved else ("200 OK", "X-A: b", png)
        writer.write(f"HTTP/1.1 {status}\r\n{more}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "localhost", 0) as server:
        url = f"http://localhost:{server.sockets[0].getsockname()[1]}"
        yield url, asked


async def test_pictures_are_fetched_from_domains_that_are_listed_and_these_send_the_worker_nowhere(
    doors: Doors,
) -> None:
    async with pictures() as (url, asked):
        elsewhere = shown(url.replace("localhost", "127.0.0.1") + "/there.png")
        refused = await doors.http.post(Endpoint.CHAT, json=elsewhere)
        assert (refused.status_code, "allowed" in refused.json()["error"]["message"]) == (400, True)
        result = await doors.bus.result(await doors.bus.submit(elsewhere))
        assert (result.status, asked) == (400, [])
        there = await doors.http.post(Endpoint.CHAT, json=shown(f"{url}/there.png"))
        assert there.status_code == 200, there.text
        moved = await doors.http.post(Endpoint.CHAT, json=shown(f"{url}/moved"))
        assert 400 <= moved.status_code < 500, moved.text
        assert asked == ["/there.png", "/moved"]


# --- recordings ---


def recording(hertz: float) -> bytes:
    """A second of a tone, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", ""))
        tone = array("h", (int(20_000 * sin(2 * pi * hertz * n / 16_000)) for n in range(16_000)))
        written.writeframes(tone.tobytes())
    return file.getvalue()


def spoken(sound: bytes, **more: Any) -> Body:
    return {
        "model": "hearer",
        "file": base64.b64encode(sound).decode(),
        "language": "en",
        "temperature": 0,
        "max_completion_tokens": 12,
        **more,
    }


def told(pieces: list[Any]) -> str:
    """The text of a stream's pieces."""
    return "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])


@pytest.mark.parametrize(
    "endpoint", [Endpoint.TRANSCRIPTIONS, pytest.param(Endpoint.TRANSLATIONS, marks=pytest.mark.long)]
)
async def test_what_is_written_of_a_recording_hangs_on_the_recording_and_not_on_the_door(
    doors: Doors, endpoint: Endpoint
) -> None:
    texts = []
    for hertz in (220, 1760):
        sound = recording(hertz)
        body = spoken(sound)
        direct = (await in_python(doors, endpoint, body))["text"]
        over_bus = await doors.bus.call(endpoint, **body)
        fields = {name: value for name, value in body.items() if name != "file"}
        answer = await doors.http.post(endpoint, data=fields, files={"file": ("tone.wav", sound)})
        assert answer.status_code == 200, answer.text
        assert over_bus.text == answer.json()["text"] == direct
        texts.append(direct)
    assert texts[0] != texts[1]
    assert all(texts)


@pytest.mark.long
async def test_openais_client_has_a_recording_written_down(doors: Doors) -> None:
    sound = recording(440)
    asked: Any = {"model": "hearer", "language": "en", "temperature": 0, "extra_body": {"max_completion_tokens": 12}}
    whole = await doors.openai.audio.transcriptions.create(file=("tone.wav", sound), **asked)
    stream = await doors.openai.audio.transcriptions.create(file=("tone.wav", sound), stream=True, **asked)
    assert whole.text
    assert told([piece.to_dict() async for piece in stream]) == whole.text


@pytest.mark.long
async def test_a_transcription_streams_on_the_bus_and_its_result_is_the_whole(doors: Doors) -> None:
    body = spoken(recording(440))
    whole = await doors.bus.call(Endpoint.TRANSCRIPTIONS, **body)
    stream = doors.bus.stream_of(Endpoint.TRANSCRIPTIONS, body)
    assert told([piece async for piece in stream]) == whole.text
    assert stream.result.body["text"] == whole.text


@pytest.mark.long
async def test_what_is_no_recording_is_refused(doors: Doors) -> None:
    result = await doors.bus.result(
        await doors.bus.submit(spoken(b"no sound at all"), endpoint=Endpoint.TRANSCRIPTIONS)
    )
    assert result.status == 400
    assert "audio" in result.error.message
