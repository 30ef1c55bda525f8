"""The clients that people ask with, the real packages: ``python -m deploy.local.clients`` installs them, apart.

What a client needs has nothing to do with what a worker needs, so that neither's versions bind the other's.
"""

import hashlib
import os
import shutil
import ssl
import sys
from pathlib import Path

from deploy.local.setup import ROOT, SetupFailed, alone, call, ensure_uv, home, say, sync, works

LOCKS = ROOT / "deploy" / "lock" / "clients"


def python_of_clients() -> Path:
    """The interpreter that has Python's clients."""
    return home() / "clients" / "python" / "bin" / "python"


def modules_of_node() -> Path:
    """The folder that has Node's."""
    return home() / "clients" / "node" / "node_modules"


def ensure() -> None:
    """Install what the locks name, where it is not there yet; Node's only where there is a Node. Raises SetupFailed."""
    files = [LOCKS / name for name in ("requirements.txt", "package.json", "package-lock.json")]
    wanted = hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), sys.version.encode()])).hexdigest()
    stamp = home() / "clients" / "gearshift-stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    with alone("clients"):
        say("installing the clients that people ask with")
        uv, python = ensure_uv(), python_of_clients()
        if not works(python):
            call(uv, "venv", "--quiet", "--clear", "--python", sys.executable, python.parents[1])
        sync(uv, python, files[0])
        npm, node = shutil.which("npm"), modules_of_node().parent
        if npm is None:
            say("there is no npm here: Node's clients are left out")
        else:
            node.mkdir(parents=True, exist_ok=True)
            for file in files[1:]:
                shutil.copy(file, node)
            call(npm, "ci", "--silent", "--no-audit", "--no-fund", "--prefix", node, variables=_trusted())
        stamp.write_text(wanted)


def _trusted() -> dict[str, str]:
    """The system's certificates for Node, which has its own: networks with a certificate of their own work too."""
    paths = ssl.get_default_verify_paths()
    files = [os.environ.get("NODE_EXTRA_CA_CERTS"), paths.cafile, f"{paths.capath}/ca-certificates.crt"]
    found = next((file for file in files if file and Path(file).is_file()), None)
    return {} if found is None else {"NODE_EXTRA_CA_CERTS": found}


if __name__ == "__main__":
    try:
        ensure()
    except SetupFailed as failure:
        say(str(failure))
        sys.exit(1)
