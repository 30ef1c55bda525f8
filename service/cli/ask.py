"""Asking for answers: send a request, wait for its result, read everybody's results."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from schemas.requests import Endpoint
from schemas.results import Outcome, Result
from schemas.usage import tokens_of
from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of
from service.client import Client
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
    request = _body(model, prompt, body)
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
            if stream and wait:
                return await _stream(client, request, options)
            sent = await client.submit(request, endpoint=endpoint, **options)
            if not wait:
                print_json({"id": sent}) if as_json else console.print(sent)
                return None
            return await client.result(sent, timeout_s=timeout)

    result = asyncio.run(run())
    if result is None:
        return
    if as_json:
        print_json(result)
    else:
        _show(result, streamed=stream)
    if result.outcome is not Outcome.COMPLETED:
        raise typer.Exit(1)


async def _stream(client: Client, request: Mapping[str, Any], options: Mapping[str, Any]) -> Result | None:
    stream = client.stream(**{**request, **options})
    try:
        async for piece in stream:
            choice = piece.choices[0] if getattr(piece, "choices", None) else None
            text = getattr(getattr(choice, "delta", None), "content", None) or getattr(choice, "text", None)
            console.say(text or "", end="")
    except RequestFailed as failed:
        return failed.result
    finally:
        console.say("")
    return stream.result


def _body(model: str | None, prompt: str | None, body: str | None) -> dict[str, Any]:
    if body is not None:
        raw = sys.stdin.read() if body == "-" else body
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"--body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("--body must be a JSON object")
        return found
    if model is None or prompt is None:
        raise ConfigError("give MODEL and PROMPT, or --body")
    text = sys.stdin.read() if prompt == "-" else prompt
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def text_of(result: Result) -> str:
    """What the model said, or why it did not."""
    if result.error is not None and result.body is None:
        return result.error.message
    if result.endpoint == Endpoint.MESSAGES and result.body is not None:
        said = [block.get("text") or json.dumps(block) for block in result.body.get("content", ())]
        return "\n".join(said)
    choices = (result.body or {}).get("choices")
    if not choices:
        return json.dumps(result.body)
    message = choices[0].get("message") or {}
    return str(message.get("content") or message.get("tool_calls") or choices[0].get("text") or "")


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
