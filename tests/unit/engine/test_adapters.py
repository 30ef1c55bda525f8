"""Where adapters may be, and whose they are: what can't be a path is refused like one that leads elsewhere."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from service.engine.answering.adapters import Adapters, resolved
from service.errors import LoraRefused, UnknownModel


@pytest.mark.parametrize("path", ["absent", "..", "x" * 300, "a\0b", "/etc", "loop/inside"])
def test_what_is_no_folder_below_the_root_is_refused(tmp_path: Path, path: str):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LoraRefused, match="lora_root"):
        resolved(tmp_path, path)


async def test_a_name_that_is_taken_stays_what_it_is_while_its_model_is_away(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    adapters, given = Adapters(tmp_path), {}
    adapters.open("llama", {"accent": "one"})
    with pytest.raises(LoraRefused, match="accent is an adapter of llama"):
        await adapters.add("llama", "accent", "two", None)

    class Back:
        loras = MappingProxyType[str, Path]({})

        async def add_lora(self, name: str, path: Path) -> None:
            given[name] = path

    back: Any = Back()
    await adapters.restore("llama", back)
    assert given == {"accent": tmp_path / "one"}
    await adapters.remove("llama", "accent", None)
    await adapters.add("llama", "accent", "two", None)
    await adapters.restore("llama", back)
    assert given == {"accent": tmp_path / "two"}


async def test_a_model_that_goes_while_an_adapter_is_loaded_into_it_is_unknown(tmp_path: Path):
    (tmp_path / "accent").mkdir()
    adapters = Adapters(tmp_path)
    adapters.open("llama", {})

    class Going:
        async def add_lora(self, _name: str, _path: Path) -> None:
            adapters.close("llama")

    going: Any = Going()
    with pytest.raises(UnknownModel, match="llama was removed while accent was loaded into it"):
        await adapters.add("llama", "accent", "accent", going)
