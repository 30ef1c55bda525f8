"""The table of settings in README.md; ``--write`` puts it there, and renews deploy/REFERENCE.md. A test checks both."""

import enum
import re
import sys
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from service.settings import GROUPS

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def table() -> str:
    """Every setting by group, with its variable and its default, in Markdown."""
    lines = ["| setting | variable | default |", "|---|---|---|"]
    for group, settings in GROUPS.items():
        lines += [f"| **{group}** | | |"]
        lines += [
            f"| `{name}` | {variables(name, field)} | {default(field)} |"
            for name, field in settings.model_fields.items()
        ]
    return "\n".join(lines)


def variables(name: str, field: FieldInfo) -> str:
    """The environment variables that are read for a setting, in their order."""
    choices = getattr(field.validation_alias, "choices", [f"GEARSHIFT_{name.upper()}"])
    return ", ".join(f"`{choice}`" for choice in choices if isinstance(choice, str) and choice != name)


def default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "made at each start" if field.default_factory else ""
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    allowed = [str(word) for word in get_args(field.annotation) if isinstance(word, str)]
    if isinstance(field.default, enum.Enum):
        allowed = [str(member.value) for member in type(field.default)]
    shown = "" if value is None or value in ((), "", {}) else f"`{value}`"
    others = [word for word in allowed if word != value]
    return shown + (f" (or {', '.join(f'`{word}`' for word in others)})" if others else "")


def with_table(text: str) -> str:
    """``text`` with the table between the two marks."""
    made = f"{BEGIN}\n{table()}\n{END}"
    found, number = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.DOTALL)
    if number != 1:
        raise ValueError(f"the marks {BEGIN} and {END} must be there once, and are {number} times")
    return found


if __name__ == "__main__":
    from deploy.local import reference

    current = README.read_text()
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(current))
        reference.FILE.write_text(reference.page())
    elif (with_table(current), reference.page()) != (current, reference.FILE.read_text()):
        sys.exit("settings are told of otherwise than they are; run python -m deploy.local.configuration --write")
