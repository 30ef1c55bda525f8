"""What the commands of chaos, soak and upgrade have in common: where logs go, and how the figures of a run are told."""

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_outlets(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--logs``."""
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a folder for the workers' logs; a temporary one otherwise")


def folder_of_logs(given: argparse.Namespace, name: str) -> Path:
    """Where the workers' logs go; aiokafka's own, here, are not shown."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that goes away is what is asked for
    folder = (given.logs or Path(tempfile.mkdtemp(prefix=f"gearshift-{name}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tell(figures: Mapping[str, Any], given: argparse.Namespace, folder: Path) -> int:
    """Print the figures, and write them where that was asked for; the exit code, 0 where they are ``good``."""
    print(json.dumps(figures, indent=2))
    if given.json:
        given.json.write_text(json.dumps({"figures": figures}, indent=2))
    if not figures["good"]:
        print(f"the workers' logs are in {folder}")
    return 0 if figures["good"] else 1
