"""The server's certificate: from files, and anew when somebody has renewed them."""

import asyncio
import ssl
from pathlib import Path

import structlog

from service.errors import ConfigError
from service.settings import HttpSettings
from service.watched_files import WatchedFiles

log = structlog.get_logger(__name__)
_LOOK_AGAIN_S = 10.0


class Certificate:
    """The files of a certificate's chain and of its key, and the context made of them.

    Connections that are open keep what they began with.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises ConfigError for files that can't be read, or that don't belong together."""
        self._files = chain, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._watched = WatchedFiles(chain, key)
        try:
            self._load(self.context)
        except OSError as error:  # ssl's errors are among them
            raise ConfigError(f"http_ssl_certfile, http_ssl_keyfile: {chain}, {key}: {error}") from None

    async def keep(self) -> None:
        """Read the files again whenever they change, until this is cancelled; files that are no use change nothing."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            self.look()

    def look(self) -> None:
        """Read the files again if they have changed."""
        if not self._watched.changed():
            return
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a half of a pair would end all handshakes
            self._load(self.context)
        except OSError as error:
            log.error("http.certificate_unreadable", why=str(error))  # noqa: TRY400  # the message says all
        else:
            log.info("http.certificate_read")

    def _load(self, context: ssl.SSLContext) -> None:
        chain, key = self._files
        context.load_cert_chain(chain, key, password=_no_password)


def certificate_of(settings: HttpSettings) -> Certificate | None:
    """None where HTTP is plain. Raises ConfigError."""
    chain, key = settings.http_ssl_certfile, settings.http_ssl_keyfile
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise ConfigError("http_ssl_certfile and http_ssl_keyfile go together")
    return Certificate(chain, key)


def _no_password() -> str:
    """Asked for at the terminal otherwise."""
    raise OSError("the key is encrypted, and there is nobody to ask for its password")
