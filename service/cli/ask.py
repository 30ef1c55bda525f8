"""Asking for answers: send a request, wait for its result, read everybody's results."""

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from schemas.errors import nearest
from schemas.requests import PATHS, Endpoint
from schemas.results import Outcome, Result
from schemas.usage import tokens_of
from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of, standard_input
from service.client import Client, Options, Stream
from service.client.asking import GRACE_S
from service.errors import ConfigError, RequestFailed


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command()(send)
    app.command()(results)
    app.command()(cancel)
    app.command()(query)


def send(
    model: Annotated[str | None, typer.Argument(help="An alias of models.yaml, or a LoRA's name.")] = None,
    prompt: Annotated[str | None, typer.Argument(help="What the user says; - reads standard input.")] = None,
    body: Annotated[
        str | None, typer.Option(help="A whole OpenAI request body as JSON instead; - reads standard input.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Where the body does not tell: /v1/embeddings, ...")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait for the result.")] = True,
    request_id: Annotated[str | None, typer.Option("--id", help="The request's id; random by default.")] = None,
    priority: Annotated[int | None, typer.Option(help="A smaller one runs earlier.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds; the request's deadline.")] = 600.0,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Produce a request and wait for its result.

    [bold]Examples[/]: gearshift send llama "Where do you walk?" --max-tokens 32

    gearshift send --body '{"model": "qwen", "prompt": "The sea", "max_tokens": 8}' --json
    """
    request, path = _body(model, prompt, body), _endpoint(endpoint)
    if max_tokens is not None:
        request["max_tokens"] = max_tokens
    if temperature is not None:
        request["temperature"] = temperature
    if stream:
        request["stream"] = True
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> Result | None:
        async with Client(settings=settings) as client:
            options = {"request_id": request_id, "priority": priority, "timeout_s": timeout}
            if wait:
                return await answered(client, request, path, options, as_it_comes=stream and not as_json)
            sent = await client.submit(request, endpoint=path, **options)
            print_json({"id": sent}) if as_json else console.print(sent)
            return None

    result = asyncio.run(run())
    if result is None:
        return
    if as_json:
        print_json(result)
    else:
        _show(result, streamed=stream)
    if result.outcome is not Outcome.COMPLETED:
        raise typer.Exit(1)


async def answered(
    client: Client,
    body: Mapping[str, Any],
    endpoint: Endpoint | None,
    options: Mapping[str, Any],
    *,
    as_it_comes: bool,
) -> Result | None:
    """Send it, and wait for its result until after its deadline, which the result then says."""
    if as_it_comes:
        return await _streamed(client.stream_of(endpoint, body, Options(**options)))
    sent = await client.submit(body, endpoint=endpoint, **options)
    return await client.result(sent, timeout_s=options["timeout_s"] + GRACE_S)


async def _streamed(stream: Stream) -> Result | None:
    try:
        async for piece in stream:
            console.say(_added(piece), end="")
    except RequestFailed as failed:
        return failed.result
    finally:
        console.say("")
    return stream.result


def _added(piece: Any) -> str:
    """What a piece adds to the text; those of chats and completions are the openai package's, others as they came."""
    choices = _of(piece, "choices")
    if isinstance(choices, list) and choices:
        text = _of(_of(choices[0], "delta"), "content") or _of(choices[0], "text")
    elif _of(piece, "type") == "content_block_delta":
        text = _of(_of(piece, "delta"), "text")
    else:
        text = _of(piece, "delta") if _of(piece, "type") == "response.output_text.delta" else None
    return text if isinstance(text, str) else ""


def _of(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _endpoint(path: str | None) -> Endpoint | None:
    try:
        return None if path is None else Endpoint(path)
    except ValueError:
        known = ", ".join(Endpoint)
        raise ConfigError(f"--endpoint: unknown {path!r}{nearest(path or '', PATHS)}; known: {known}") from None


def _body(model: str | None, prompt: str | None, body: str | None) -> dict[str, Any]:
    if body is not None:
        raw = standard_input() if body == "-" else body
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"--body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("--body must be a JSON object")
        return found
    if model is None or prompt is None:
        raise ConfigError("give MODEL and PROMPT, or --body")
    text = standard_input() if prompt == "-" else prompt
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def text_of(result: Result) -> str:
    """What the model said, or why it did not; the JSON of a body of another shape."""
    if result.error is not None and result.body is None:
        return result.error.message
    try:
        return _text_in(result.body or {}, result.endpoint)
    except (AttributeError, LookupError, TypeError):
        return json.dumps(result.body)


def _text_in(body: Mapping[str, Any], endpoint: str | None) -> str:
    if endpoint == Endpoint.MESSAGES:
        return "\n".join(block.get("text") or json.dumps(block) for block in body["content"])
    choice = body["choices"][0]
    message = choice.get("message") or {}
    return str(message.get("content") or message.get("tool_calls") or choice.get("text") or "")


def _show(result: Result, *, streamed: bool) -> None:
    if result.outcome is not Outcome.COMPLETED:
        why = result.error.message if result.error else ""
        console.print(Text.assemble((result.outcome, "red"), f" ({result.status}): {why}"))
    if not streamed and result.body is not None:
        console.say(text_of(result))
    generated = tokens_of(result.body)["generated_tokens"]
    console.print(
        f"{result.model} · {generated} tokens · {result.timing.latency_s:.2f} s · "
        f"waited {result.timing.waited_s:.2f} s · frozen {len(result.timing.freezes)} times · {result.id}",
        style="dim",
    )


def results(
    past: Annotated[bool, typer.Option("--past", help="From the oldest kept.")] = False,
    follow: Annotated[bool, typer.Option(help="Go on as they come; --no-follow stops at the newest.")] = True,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Read everybody's results.

    [bold]Examples[/]: gearshift results --past --no-follow --json | jq .id
    """
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> None:
        async with Client(settings=settings) as client:
            async for result in client.results(past=past, follow=follow):
                if as_json:
                    print_json(result)
                else:
                    colour = "green" if result.outcome is Outcome.COMPLETED else "red"
                    model = f"{result.model or '-':12}"
                    said = text_of(result).replace("\n", " ")[:100]
                    parts = ((f"{result.outcome:9}", colour), " ", (model, "bold"), f" {result.id}  {said}")
                    console.print(Text.assemble(*parts), soft_wrap=True)

    _until_interrupted(run())


def _until_interrupted(work: Any) -> None:
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def cancel(
    request_id: Annotated[str | None, typer.Argument(help="The request's id.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="All requests of this correlation id.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
) -> None:
    """Cancel a request wherever it is; its result says so, with what it had by then."""
    if request_id is None and correlation_id is None:
        raise ConfigError("give a request's ID, or --correlation-id")
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> str:
        async with Client(settings=settings) as client:
            return await client.cancel(request_id, correlation_id=correlation_id)

    console.print(f"asked ({asyncio.run(run())})")


def query(
    request_id: Annotated[str | None, typer.Argument(help="A request's id; without one, the whole state.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Ask the workers where a request stands, or how they stand themselves."""
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> dict[str, dict[str, Any]]:
        async with Client(settings=settings) as client:
            return await client.query(request_id)

    answers = asyncio.run(run())
    if as_json:
        print_json(answers)
        return
    table = Table("worker", "answer")
    for worker, answer in answers.items():
        table.add_row(worker, json.dumps(answer, indent=1))
    console.print(table)
