"""Small JSON objects of the store: a body in an envelope that proves the bytes are whole.

    {"body":{...},"checksum":"xxh3_128:<32 hex digits of the body's bytes>"}\\n

Claims, seals, manifests and the run's marker are documents. A flipped bit, a cut, an appended byte and a body
that belongs under another key are all found when the document is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError

from training.errors import Corrupt, Invalid

FORMAT = 1
_HEAD = b'{"body":'
_MIDDLE = b',"checksum":"'
_TAIL = b'"}\n'


class Document(BaseModel):
    """Base of everything stored as JSON. Unknown optional fields are ignored: later versions may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    format: int = FORMAT


D = TypeVar("D", bound=Document)


def wall_clock() -> str:
    """Now, as `created` of a document says it. For people: nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of bytes, as `xxh3_128:<hex>`: finds damage, does not resist an adversary."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def encode(document: Document) -> bytes:
    """Bytes of a document. The same document always gives the same ones."""
    return enveloped(print_json(document))


def enveloped(body: bytes) -> bytes:
    """Bytes of a document whose body is printed already."""
    return b"".join((_HEAD, body, _MIDDLE, digest(body).encode(), _TAIL))


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """A printed object with more fields, which are printed, too."""
    more = (b',"%s":%s' % (name.encode(), value) for name, value in fields.items())
    return b"".join((memoryview(body)[:-1], *more, b"}"))


def print_json(model: BaseModel, leave_out: set[str] | None = None) -> bytes:
    """A document, or a section of one, as it is written: in ASCII, without what is null."""
    try:  # a commit waits for this: three times as fast as by way of a dict
        return model.model_dump_json(exclude=leave_out, exclude_none=True, ensure_ascii=True).encode()
    except PydanticSerializationError:  # half a surrogate pair, as in names of files
        fields = _without_nan(model.model_dump(mode="json", exclude=leave_out, exclude_none=True))
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def plain_json(value: Any, what: str) -> Any:
    """A copy of the caller's JSON, as it will come back: NaN and infinities as strings, tuples as lists.

    Raises:
        Invalid: it holds something that JSON does not know; refused now, not in the background after hours.
    """
    try:
        return _without_nan(json.loads(json.dumps(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(
            f"{what} is not plain JSON: {error}", hint="convert tensors and numpy numbers with float() or int()"
        ) from error


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: strings stand for it, which pydantic reads back as floats."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def decode(data: bytes, model: type[D], key: str) -> D:
    """Check the envelope and parse the body.

    Raises:
        Corrupt: the bytes are not exactly what `encode` wrote; names expected and actual digest.
        Invalid: a later format version wrote the document.
    """
    body, middle, rest = data[len(_HEAD) :].rpartition(_MIDDLE)
    if not (data.startswith(_HEAD) and middle and rest.endswith(_TAIL)):
        raise Corrupt(f"{key}: expected a whole document, actual {len(data)} bytes are cut or altered", key=key)
    expected, actual = rest[: -len(_TAIL)].decode("ascii", "replace"), digest(body)
    if expected != actual:
        raise Corrupt(f"{key}: expected digest {expected}, actual {actual}", key=key)
    fields: dict[str, Any] = json.loads(body)
    if fields.get("format") != FORMAT:
        raise Invalid(
            f"{key} has format {fields.get('format')!r}; this version reads format {FORMAT}",
            hint="upgrade retoma, or read it with the version that wrote it",
            key=key,
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise Corrupt(f"{key} does not hold a {model.__name__}: {error}", key=key) from error
