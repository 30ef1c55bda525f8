"""Files in YAML that operators write."""

from pathlib import Path
from typing import Any

import yaml

from service.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML's, as it is before vLLM is imported: a library of its constraints has dates read as strings."""

    yaml_constructors = yaml.SafeLoader.yaml_constructors.copy()
    yaml_implicit_resolvers = yaml.SafeLoader.yaml_implicit_resolvers.copy()


def read_yaml(path: Path) -> Any:
    """What a file says; None where it says nothing. Raises ConfigError, and FileNotFoundError where it is not there."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is the safe one
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except Exception as error:  # whatever making a number or a date of a word raises comes through
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
