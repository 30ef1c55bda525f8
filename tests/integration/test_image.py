"""The image, built on this machine and shown at work, where the tools for that are installed."""

import json
import subprocess
from itertools import product
from pathlib import Path

import pytest

from deploy.local.containers import missing
from deploy.local.models import SPEAKERS
from deploy.local.setup import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_the_image_is_built_serves_confined_and_stops_when_it_is_told(tmp_path: Path) -> None:
    if lack := missing():
        pytest.skip(lack)
    command = [ROOT / "deploy/local/image", "--folder", tmp_path / "images", "--json", tmp_path / "seen.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["failures"] == []
    assert seen["base"] in {"registry", "packages"}
    assert 500_000_000 < seen["size_bytes"] < 3_500_000_000
    assert seen["left_behind"] == []
    answers = {SPEAKERS[0].answer(*first).strip() for first in product(range(5), repeat=3)}
    assert {seen["answer"].strip(), seen["served_answer"].strip()} <= answers
    assert 0 < seen["healthy_s"] < seen["serve"]["ready_s"]
    assert 0 < seen["worker"]["ready_s"] < seen["first_answer_s"]
    assert seen["compiles"] is True
    assert seen["healthy_before_it_serves"] is False
    for served in (seen["worker"], seen["serve"]):
        assert served["confined"] == {
            "user": 10001,
            "capabilities": 0,
            "no_new_privileges": True,
            "root_read_only": True,
        }
        assert served["exit_code"] == 0
        assert 0 < served["stop_s"] < 90
    assert not (tmp_path / "images").exists()
