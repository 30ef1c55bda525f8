"""What users import, and what that costs."""

import subprocess
import sys

import pytest

PUBLIC = ("MultiModelEngine", "MultiModelLLM", "VllmEngine")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_class_is_found_in_the_package_without_importing_vllm_or_torch(name: str) -> None:
    code = (
        f"import sys; from service.engine import {name}; assert isinstance({name}, type); "
        "print(*sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_is_not_public_is_no_attribute_and_dir_names_what_is() -> None:
    import service.engine

    assert set(PUBLIC) == set(dir(service.engine))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        service.engine.Nothing  # noqa: B018
