"""A program that asks through the client all along, as applications do, and reads what an operator reads at the end."""

import asyncio
import random
import time
import uuid

from service.client import Client
from service.errors import BrokerUnavailable, GearshiftError, RequestCancelled, StreamBroken
from service.kafka.dead_letters import dead_letters
from service.settings import Settings
from tests.chaos.asking import ALIASES, LONG, TTL_S
from tests.chaos.check import Asked

_REST_S = 0.5
_LAST_WITHIN_S = 60.0


class Caller:
    """One request after the other, every second one streamed. What the client gives must be what was asked for."""

    def __init__(self, *, settings: Settings, asked: dict[str, Asked], seed: int, long_answers: bool = False) -> None:
        self._most_words = LONG[0] if long_answers else 20
        self._settings = settings
        self._asked = asked
        self._dice = random.Random(seed)
        self.calls = 0
        self.unsure = 0
        """Calls that no broker took, or said that it took."""
        self.wrong: list[str] = []
        """Answers that were not as asked, and errors that no fault accounts for."""

    async def ask_until(self, enough: asyncio.Event) -> None:
        """Ask until then; the last call may take ``_LAST_WITHIN_S`` more."""
        asking = asyncio.create_task(self._ask_on(enough), name="caller")
        await enough.wait()
        await asyncio.wait((asking,), timeout=_LAST_WITHIN_S)
        if not asking.done():
            asking.cancel()
            self.wrong.append("a call did not end")
        await asyncio.gather(asking, return_exceptions=True)

    async def _ask_on(self, enough: asyncio.Event) -> None:
        try:
            async with Client(settings=self._settings, timeout_s=TTL_S) as client:
                while not enough.is_set():
                    await self._ask(client, streamed=self.calls % 2 == 1)
                    self.calls += 1
                    await asyncio.sleep(_REST_S)
        except Exception as error:  # any at all is a finding
            self.wrong.append(f"the client ended: {error!r}")

    async def look(self) -> None:
        """Read what is meant for operators: workers, their statuses and the dead letters, whoever wrote them."""
        async with Client(settings=self._settings) as client:
            try:
                await client.presences()
                [status async for status in client.statuses(past=True, follow=False)]
                await dead_letters(self._settings)
            except Exception as error:  # any at all is a finding
                self.wrong.append(f"reading as an operator: {error!r}")

    async def _ask(self, client: Client, *, streamed: bool) -> None:
        model, words, id_ = self._dice.choice(ALIASES), self._dice.randint(1, self._most_words), uuid.uuid4().hex
        self._asked[id_] = Asked(model=model, at=time.time(), words=words)
        body = {"messages": [{"role": "user", "content": f"call {id_}"}], "max_tokens": words, "request_id": id_}
        wanted = [f"{model}{n}" for n in range(words)]
        try:
            if streamed:
                pieces = [piece async for piece in client.stream(model=model, **body)]
                said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            else:
                said = str((await client.chat(model=model, **body)).choices[0].message.content)
        except StreamBroken:
            return  # its worker died, and another one began anew
        except BrokerUnavailable:  # as promised while brokers are away, and the record may be there or not
            self._asked[id_].unsure = True
            self.unsure += 1
            return
        except GearshiftError as error:
            if not (isinstance(error, RequestCancelled) and self._asked[id_].cancelled):
                self.wrong.append(f"{id_}: {error!r}")
            return
        if said.split() != wanted:
            self.wrong.append(f"{id_}: {said!r} instead of {' '.join(wanted)!r}")
