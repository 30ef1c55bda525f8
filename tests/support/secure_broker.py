"""A broker that asks who is there: TLS with certificates made here, SASL by four mechanisms, and ACLs."""

import base64
import datetime as dt
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deploy.local.broker import SCRAM, LocalBroker, free_port
from service.kafka.acls import Acl, Resource

_RESOURCES = {Resource.TOPIC: 2, Resource.GROUP: 3, Resource.TRANSACTIONAL_ID: 5}
_OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
_LITERAL, _PREFIXED, _ALLOW = 3, 4, 3


class Authority:
    """Signs certificates for names; everything lies in a folder as PEM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._signed(self._name, self._key, [constraints])
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for a name, and its key; good for 127.0.0.1 too."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
        certificate = self._signed(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, [names])
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extensions: Iterable[Any]) -> Any:
        now = dt.datetime.now(dt.UTC)
        authority = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(hours=2))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


def unsigned_token(subject: str) -> str:
    """A bearer token that a broker without a token service takes: a JWT that nobody signed."""
    said = {"alg": "none"}, {"sub": subject, "iat": time.time(), "exp": time.time() + 3600}
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in said) + "."


def seal(key: Path, password: bytes) -> None:
    """Encrypt a private key in its file."""
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    sealed = serialization.BestAvailableEncryption(password)
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed))


@dataclass
class SecureBroker:
    """``admin`` is a door without questions, for the test itself; ``tls`` wants a certificate, ``sasl`` a login."""

    local: LocalBroker
    authority: Authority
    admin: str
    tls: str
    sasl: str
    passwords: Mapping[str, str] = field(default_factory=dict)

    async def allow(self, principal: str, acls: Iterable[Acl]) -> None:
        """Give a principal what it needs."""
        client = AIOKafkaAdminClient(bootstrap_servers=self.admin)
        await client.start()
        try:
            for acl in acls:
                pattern = _PREFIXED if acl.prefixed else _LITERAL
                for operation in acl.operations:
                    asked = CreateAclsRequest(
                        *(_RESOURCES[acl.resource], acl.name, pattern, principal, "*", _OPERATIONS[operation], _ALLOW)
                    )
                    answer = await client._send_to_controller(asked)
                    ((code, message, *_),) = answer.creation_responses
                    assert code == 0, message
        finally:
            await client.close()


@contextmanager
def secure_broker(folder: Path, passwords: Mapping[str, str]) -> Iterator[SecureBroker]:
    """It runs until the block ends, and knows these users."""
    authority = Authority(folder)
    certificate, key = authority.issue("broker")
    keystore = folder / "broker.pem"
    keystore.write_text(key.read_text() + certificate.read_text())
    admin, controller, tls, sasl = (free_port() for _ in range(4))
    properties = _properties(admin, controller, tls, sasl, keystore, authority.ca, passwords)
    with LocalBroker(properties, users=passwords) as broker:
        where = [f"127.0.0.1:{port}" for port in (admin, tls, sasl)]
        yield SecureBroker(broker, authority, *where, passwords)


def _properties(
    admin: int, controller: int, tls: int, sasl: int, keystore: Path, ca: Path, passwords: Mapping[str, str]
) -> dict[str, str]:
    doors = f"PLAINTEXT://127.0.0.1:{admin},TLS://127.0.0.1:{tls},SASL://127.0.0.1:{sasl}"
    security = "org.apache.kafka.common.security"
    users = " ".join(f'user_{user}="{password}"' for user, password in passwords.items())
    return {
        "listeners": f"{doors},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": doors,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(ca),
        "listener.name.tls.ssl.client.auth": "required",
        "listener.name.tls.ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
        "listener.name.sasl.sasl.enabled.mechanisms": ",".join(("PLAIN", *SCRAM, "OAUTHBEARER")),
        "listener.name.sasl.plain.sasl.jaas.config": f"{security}.plain.PlainLoginModule required {users};",
        **{
            f"listener.name.sasl.{name.lower()}.sasl.jaas.config": f"{security}.scram.ScramLoginModule required;"
            for name in SCRAM
        },
        "listener.name.sasl.oauthbearer.sasl.jaas.config": (f"{security}.oauthbearer.OAuthBearerLoginModule required;"),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
