"""Where adapters may be: what can't be a path is refused like one that leads elsewhere."""

from pathlib import Path

import pytest

from service.engine.answering.adapters import resolved
from service.errors import LoraRefused


@pytest.mark.parametrize("path", ["absent", "..", "x" * 300, "a\0b", "/etc", "loop/inside"])
def test_what_is_no_folder_below_the_root_is_refused(tmp_path: Path, path: str):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LoraRefused, match="lora_root"):
        resolved(tmp_path, path)
