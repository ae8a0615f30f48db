"""Small typed facts as metadata of a Prefect artifact.

The server cuts each metadata value at 500 characters, silently; so every field becomes a value of its own, nested
ones with dotted keys, and long text is cut here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from training.config import Frozen

TEXT_CHARACTERS = 240  # each may need an escape
M = TypeVar("M", bound=Frozen)


def to_metadata(facts: Frozen) -> dict[str, str]:
    """Each field that is set, as JSON."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            found[prefix] = json.dumps(
                value[:TEXT_CHARACTERS] if isinstance(value, str) else value, ensure_ascii=False
            )

    walk("", facts.model_dump(mode="json"))
    return found


def from_metadata(model: type[M], metadata: Mapping[str, str]) -> M | None:
    """The facts again; None if these are others, or of another version."""
    tree: dict[str, Any] = {}
    try:
        for key, text in metadata.items():
            section, dot, name = key.partition(".")  # one level of nesting; names may hold dots themselves
            value = json.loads(text)
            if dot:
                tree.setdefault(section, {})[name] = value
            else:
                tree[section] = value
        return model.model_validate(tree)
    except (ValueError, ValidationError):
        return None
