"""Write the README's tables of settings from ``config.py``: ``.venv/bin/python scripts/settings_table.py``."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neuron_pushkv import config

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- settings: written by scripts/settings_table.py -->"
END = "<!-- end of settings -->"
SECTIONS: tuple[tuple[type[BaseModel], str], ...] = (
    (config.ConnectorSettings, "Connector (`kv_connector_extra_config` of an engine)"),
    (config.RouterSettings, "Router (`router` in a fleet file)"),
    (config.FleetSettings, "Fleet file"),
    (config.EngineSettings, "Engine (each of `engines` in a fleet file)"),
)


def descriptions(settings: type[BaseModel]) -> dict[str, str]:
    """The text below each field of a settings class, by the field's name; inherited fields too."""
    found: dict[str, str] = {}
    for ancestor in reversed(settings.__mro__):
        if ancestor.__module__ != config.__name__:
            continue
        body = ast.parse(inspect.getsource(ancestor)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(text.value.value).split()).replace("``", "`")
    return found


def shown_default(field: FieldInfo) -> str:
    """The default as it would be written in a fleet file."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def choices(field: FieldInfo) -> str:
    """The allowed values, where there is a closed list of them."""
    if get_origin(field.annotation) is not Literal:
        return ""
    return "One of " + ", ".join(f"`{value}`" for value in get_args(field.annotation)) + ". "


def tables() -> str:
    """All sections as Markdown."""
    parts = []
    for settings, title in SECTIONS:
        texts = descriptions(settings)
        rows = [
            f"| `{name}` | {shown_default(field)} | {choices(field)}{texts.get(name, '')} |"
            for name, field in settings.model_fields.items()
        ]
        parts.append("\n".join([f"**{title}**", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def with_tables(readme: str) -> str:
    """``readme`` with the text between the two marks replaced. Raises :class:`ValueError` if a mark is missing."""
    before, after = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return f"{readme[:before]}\n{tables()}\n{readme[after:]}"


def main() -> None:
    """Write the README."""
    README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
