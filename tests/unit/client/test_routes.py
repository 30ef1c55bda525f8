"""Which topic a request is written to, by what is known of the workers."""

from schemas.contexts import ContextInfo, Tier
from schemas.status import Presence
from service.client.routes import Routes
from service.errors import BrokerUnavailable
from service.settings import TopicSettings


class Pool:
    """Workers as they say what they have, a clock, and the topics that follow from both."""

    def __init__(self, *aliases: str) -> None:
        self.aliases = aliases
        self.away = False
        self.asked = 0
        self.now = 100.0
        self.routes = Routes(topics=TopicSettings(), presences=self.presences, clock=lambda: self.now)

    async def presences(self):
        self.asked += 1
        if self.away:
            raise BrokerUnavailable("nobody there")
        contexts = tuple(ContextInfo(alias=alias, tier=Tier.PARKED) for alias in self.aliases)
        return [Presence(worker="w", pool="p", at=0, interval_s=1, contexts=contexts)]

    async def topics(self, *models: object) -> list[str]:
        return [await self.routes.topic_for(model) for model in models]


async def test_a_model_that_a_worker_has_has_its_own_topic_and_all_else_goes_to_the_shared_one():
    pool = Pool("llama", "qwen")
    assert await pool.topics("qwen", "llama", "qwem", None, ["qwen"]) == [
        "requests.qwen",
        "requests.llama",
        "requests",
        "requests",
        "requests",
    ]
    assert pool.asked == 1


async def test_what_workers_have_is_looked_at_again_after_a_moment():
    pool = Pool("llama")
    assert await pool.topics("qwen") == ["requests"]
    pool.aliases = ("qwen",)
    assert await pool.topics("qwen") == ["requests"]
    pool.now += 2
    assert await pool.topics("qwen", "llama") == ["requests.qwen", "requests"]


async def test_where_nothing_can_be_known_requests_are_not_held_up_for_it():
    pool = Pool("qwen")
    pool.away = True
    assert await pool.topics("qwen", "qwen") == ["requests", "requests"]
    pool.now += 2
    assert await pool.topics("qwen") == ["requests"]
    assert pool.asked == 1
    pool.away, pool.now = False, pool.now + 30
    assert await pool.topics("qwen") == ["requests.qwen"]
