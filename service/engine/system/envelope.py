"""What crosses into the engine core as cloudpickle is signed with a key made at each launch, and refused otherwise.

The key reaches the engine's processes by their environment, which only this user can read. Verification comes before
unpickling, so that a payload from anyone else is never executed; errors say nothing of what a payload holds.
"""

import hashlib
import hmac
import os
import secrets
from typing import Any

import cloudpickle

KEY_VARIABLE = "_GEARSHIFT_LAUNCH_KEY"
_DIGEST = hashlib.sha256
_SIGNATURE_BYTES = _DIGEST().digest_size


class ForgedEnvelope(ValueError):
    """A payload without this launch's signature; it was not unpickled."""


class UnreadableEnvelope(ValueError):
    """A payload of this launch that can't be unpickled here, for instance for a module that is missing."""


def new_key() -> str:
    """A key for one launch."""
    return secrets.token_hex(32)


def launch_key() -> str:
    """The key of the launch that this process belongs to. Raises ForgedEnvelope where there is none."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise ForgedEnvelope("this engine process was not launched by gearshift: it has no key to check a payload with")
    return key


def seal(value: Any, *, key: str) -> bytes:
    """``value`` as signed cloudpickle: the signature (32 bytes), then the pickle."""
    payload = cloudpickle.dumps(value)
    return hmac.digest(key.encode(), payload, _DIGEST) + payload


def unseal(sealed: bytes, *, key: str) -> Any:
    """The value of an envelope. Raises ForgedEnvelope before anything is unpickled, UnreadableEnvelope after."""
    signature, payload = bytes(sealed[:_SIGNATURE_BYTES]), bytes(sealed[_SIGNATURE_BYTES:])
    if not hmac.compare_digest(signature, hmac.digest(key.encode(), payload, _DIGEST)):
        raise ForgedEnvelope("the payload is not signed with this launch's key; it was not read")
    try:
        return cloudpickle.loads(payload)
    except Exception as error:
        raise UnreadableEnvelope(f"a signed payload could not be read: {type(error).__name__}") from None
