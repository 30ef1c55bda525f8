"""``gearshift plan``: from results to a table, figures and a picture."""

import gzip
import json
import xml.etree.ElementTree as ET
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from schemas.objectives import Objective
from service.cli.main import app
from service.cli.plan import devices_of, objective_of
from service.cli.planned import figures as planned_figures
from service.errors import ConfigError
from service.scheduling.coarse import Tally
from service.scheduling.machines import gaudi_model
from service.scheduling.plan import Level, Pool
from service.scheduling.traffic import Traffic
from tests.bench.production import Record
from tests.bench.trace_results import results

MODELS = ("8b", "14b", "32b")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A folder with a pool's results and its models.yaml: three conversations a second."""
    records = [Record(n / 3, "conv", 600 + n % 7 * 300, 100 + n % 5 * 80) for n in range(100)]
    (tmp_path / "results.jsonl").write_text("\n".join(results(records, MODELS)), encoding="utf-8")
    models = {alias: {"model": f"trace/{alias}", "max_model_len": 8192} for alias in MODELS}
    models["14b"]["objective"] = {"ttft_s": 4, "tpot_s": 0.2, "share": 0.5}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": models}), encoding="utf-8")
    return tmp_path


def asked(pool: Path, *words: str, objective: str | None = "ttft_s=2,tpot_s=0.05") -> Result:
    arguments = ["plan", "--results", str(pool / "results.jsonl"), "--models", str(pool / "models.yaml")]
    if objective is not None:
        arguments += ["--objective", objective]
    return CliRunner().invoke(app, [*arguments, "--devices", "1..3", *words])


def figures(pool: Path, *words: str) -> dict:
    said = asked(pool, "--json", str(pool / "plan.json"), *words)
    assert said.exit_code == 0, said.exception
    return json.loads((pool / "plan.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("replayed", ["policy", "coarse"])
def test_each_number_of_devices_has_a_row_with_all_that_was_asked(pool: Path, replayed: str):
    made = figures(pool, "--replay", replayed, "--device-hour-cost", "4")["plans"]["as it is"]
    assert (made["requests"], made["replayed_by"]) == (100, replayed)
    assert [row["devices"] for row in made["levels"]] == [1, 2, 3]
    for row, more in pairwise(made["levels"]):
        assert row["met"] <= more["met"]
        assert row["one_more"]["met"] == more["met"] - row["met"]
    for row in made["levels"]:
        assert sum(model["requests"] for model in row["models"].values()) == 100
        assert sum(model["met"] for model in row["models"].values()) == row["met"]
        assert {alias for device in row["placement"] for kind in device.values() for alias in kind} == set(MODELS)
        assert 0 < row["serving_share"] + row["switching_share"] <= 1
        assert row["cost_per_million_tokens"] > 0
    assert made["enough"] in {1, 2, 3, None}


def test_a_burst_has_its_price_and_nearly_enough_is_not_enough(pool: Path):
    """All at once, as a batch: what it costs is the time in which it is worked off."""
    records = [Record(0.0, "conv", 600, 100) for _ in range(60)]
    (pool / "results.jsonl").write_text("\n".join(results(records, MODELS[:1])), encoding="utf-8")
    made = figures(pool, "--device-hour-cost", "4", "--objective", "ttft_s=30,tpot_s=0.5,share=1")["plans"]["as it is"]
    assert all(row["cost_per_million_tokens"] > 0 for row in made["levels"])
    counts, goal = {"a": 30_000}, Objective(ttft_s=1, tpot_s=1, share=1.0)
    traffic = Traffic(tuple(counts), *(array(kind, [1] * 30_000) for kind in "diii"))
    traffic.of[:] = array("i", [0] * 30_000)
    planned = Pool(traffic, (gaudi_model("a", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3),), (goal,), 1e11)
    levels = [Level(((0,),), (Tally(met_of={0: met}, met=met, missed=30_000 - met),)) for met in (29_999, 30_000)]
    assert planned_figures(planned, levels, device_hour_cost=None)["enough"] is None


def test_a_table_tells_it_and_where_models_are_to_be(pool: Path):
    said = asked(pool)
    assert said.exit_code == 0, said.exception
    assert "100 requests" in said.stdout
    assert "one more" in said.stdout
    assert "placement on" in said.stdout
    assert all(alias in said.stdout for alias in MODELS)


def test_of_many_requests_slices_are_replayed_and_that_is_said(pool: Path):
    said = asked(pool, "--most-requests", "40", "--json", str(pool / "plan.json"))
    made = json.loads((pool / "plan.json").read_text(encoding="utf-8"))["plans"]["as it is"]
    assert (made["requests"], made["requests_in_all"]) == (40, 100)
    assert "as it is: 40 of 100 requests in 0.0 h" in said.stdout


def test_one_thing_is_changed_and_both_are_shown(pool: Path):
    words = [
        word
        for change in ("traffic=2", "add=24b:0.5", "objective=ttft_s:0.2,share:0.2")
        for word in ("--what-if", change)
    ]
    made = figures(pool, *words)["plans"]
    assert list(made) == ["as it is", "traffic=2", "add=24b:0.5", "objective=ttft_s:0.2,share:0.2"]
    now, faster, more, stricter = made.values()
    assert faster["hours"] == pytest.approx(now["hours"] / 2, abs=1e-3)
    assert more["requests"] == 150
    assert more["levels"][0]["models"]["24b"]["requests"] == 50
    for changed in (faster, more):
        assert changed["levels"][1]["share"] <= now["levels"][1]["share"]
    assert stricter["share_asked"] == 0.2 < now["share_asked"]
    assert [row["met"] for row in stricter["levels"]] != [row["met"] for row in now["levels"]]


def test_the_picture_has_a_line_for_each_plan_and_a_point_for_each_number_of_devices(pool: Path):
    figures(pool, "--svg", str(pool / "plan.svg"), "--what-if", "traffic=2")
    drawn = ET.fromstring((pool / "plan.svg").read_text(encoding="utf-8"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawn.findall(f"{name}polyline")) == 2
    assert len(drawn.findall(f"{name}circle")) == 6
    assert {"as it is", "traffic=2", "asked for"} <= {text.text for text in drawn.findall(f"{name}text")}


def test_results_come_in_several_files_and_what_can_not_be_used_is_said(pool: Path):
    (pool / "more.jsonl").write_text('{"nothing": 1}\n', encoding="utf-8")
    said = asked(pool, "--results", str(pool / "more.jsonl"), "--results", str(pool / "results.jsonl"))
    assert said.exit_code == 0, said.exception
    assert "100 requests" in said.stdout
    assert "1 records left out" in said.stdout
    assert "100 records left out" in said.stdout


def test_models_whose_size_nobody_tells_are_named(pool: Path):
    models = {alias: {"model": "trace/secret"} for alias in MODELS}
    (pool / "models.yaml").write_text(yaml.safe_dump({"models": models}), encoding="utf-8")
    assert figures(pool, "--size", "8b=8", "--size", "14b=14")["plans"]["as it is"]["assumed_sizes"] == ["32b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "8..1"], "--devices '8..1'"),
        (["--device", "gaudi4"], "unknown 'gaudi4' .did you mean 'gaudi3'"),
        (["--replay", "fast"], "--replay: unknown 'fast'"),
        (["--what-if", "trafic=2"], "traffic=2, add=MODEL:SHARE.*did you mean 'traffic'"),
        (["--what-if", "traffic=0"], "--what-if 'traffic=0'"),
        (["--what-if", "add=24b"], "--what-if 'add=24b'"),
        (["--what-if", "objective=ttft:1"], "--what-if objective: ttft: Extra inputs"),
        (["--size", "8b=big"], "--size '8b=big'"),
        (["--size", "9b=9"], "unknown alias '9b'"),
        (["--size", "8b=100"], "8b takes 2.. GB, and a gaudi3 has 120"),
        (["--results", "no/such/file"], "no such file: no/such/file"),
    ],
)
def test_what_is_wrong_is_said_by_name(pool: Path, words: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        raise asked(pool, *words).exception or AssertionError("it was taken")


def test_an_objective_is_needed_where_models_yaml_has_none(pool: Path):
    with pytest.raises(ConfigError, match=r"(32b|8b) has no objective"):
        raise asked(pool, objective=None).exception or AssertionError("it was taken")


def test_devices_and_objectives_are_read():
    assert devices_of("4") == range(4, 5)
    assert devices_of("1..8") == range(1, 9)
    assert objective_of("ttft_s=2,tpot_s:0.1") == Objective(ttft_s=2, tpot_s=0.1)
    with pytest.raises(ConfigError, match=r"--objective.*write ttft_s=2"):
        objective_of("soon")


@pytest.mark.parametrize(
    "harm", [lambda packed: b"{}\n", lambda packed: packed[:-20], lambda packed: packed[:20] + b"x" * 99]
)
def test_a_compressed_file_that_is_none_or_is_cut_off_is_told_in_a_line(pool: Path, harm):
    packed = gzip.compress((pool / "results.jsonl").read_bytes())
    (pool / "harmed.gz").write_bytes(harm(packed))
    found = asked(pool, "--results", str(pool / "harmed.gz"))
    assert isinstance(found.exception, ConfigError)
    assert f"--results: {pool}/harmed.gz: " in str(found.exception)


def test_a_line_that_is_no_text_is_left_out_from_standard_input_too(pool: Path):
    arguments = ["plan", "--results", "-", "--models", str(pool / "models.yaml"), "--objective", "ttft_s=2,tpot_s=0.05"]
    given = b"\xff\n" + (pool / "results.jsonl").read_bytes()
    found = CliRunner().invoke(app, [*arguments, "--devices", "1"], input=given)
    assert found.exit_code == 0, found.exception
    assert "1 records left out" in found.output
