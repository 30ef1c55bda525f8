"""What clients may do at a broker with an authorizer: everything, but for what a test limits."""

from dataclasses import dataclass
from functools import partial
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest

from tests.support.bus import until

AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
"""Broker properties: whoever connects may do everything to what no ACL speaks of."""
_TOPIC, _GROUP, _TRANSACTIONAL_ID = 2, 3, 5
_LITERAL, _PREFIXED = 3, 4
_ALLOW = 3
_OPERATIONS = {"read": 3, "write": 4, "describe": 8}
_EVERYBODY = "User:*"


@dataclass(frozen=True)
class Acl:
    """What is still allowed to a resource; everything else about it no longer is."""

    resource: int
    name: str
    pattern: int
    operations: tuple[str, ...]

    @classmethod
    def topic(cls, name: str, *operations: str) -> Self:
        return cls(_TOPIC, name, _LITERAL, operations)

    @classmethod
    def group(cls, name: str, *operations: str) -> Self:
        return cls(_GROUP, name, _LITERAL, operations)

    @classmethod
    def transactions(cls, prefix: str, *operations: str) -> Self:
        """Of all transactional ids that begin so."""
        return cls(_TRANSACTIONAL_ID, prefix, _PREFIXED, operations)


async def allow_only(bootstrap: str, acl: Acl) -> None:
    """From now on only that is allowed to the resource: a broker hears of it later than who asked is answered."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        for operation in acl.operations:
            one = (acl.resource, acl.name, acl.pattern, _EVERYBODY, "*", _OPERATIONS[operation], _ALLOW)
            response = await admin._send_to_controller(CreateAclsRequest(*one))
            assert [code for code, _ in response.creation_responses] == [0], response

            await until(partial(_is_in_force, admin, DescribeAclsRequest(*one)))
    finally:
        await admin.close()


async def _is_in_force(admin: AIOKafkaAdminClient, described: DescribeAclsRequest) -> bool:
    return bool((await admin._send_request(described)).resources)
