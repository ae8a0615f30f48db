from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.end import End
from training.checkpoint.manifest import Health, Manifest, MetricPoint
from training.checkpoint.token import Claim


def manifest(**fields: Any) -> Manifest:
    return Manifest(
        run="r", token=1, sequence=0, kind="base", layout_digest="l", chunk_count=0, state_digest="s", **fields
    )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 5e-324, 1e22, -0.0, 0.1])
def test_numbers_come_back_from_wherever_they_are(number: float) -> None:
    made = manifest(
        meta={"a": [{"b": number}]},
        health=Health(loss=number),
        metrics=(MetricPoint(step=1, values={"loss": number}),),
    )
    found = decode(encode(made), Manifest, "m")
    for back in (found.health.loss, found.metrics[0].values["loss"]):
        assert back is not None
        assert repr(back) == repr(number)
    told = found.meta["a"][0]["b"]
    assert repr(told) == (repr(number) if math.isfinite(number) else repr(str_of(number)))


def test_no_section_of_a_document_turns_a_number_into_null() -> None:
    """JSON has no NaN: pydantic writes null for it, unless each model says otherwise."""
    seen: set[type[BaseModel]] = set()
    for document in Document.__subclasses__():
        visit(document, seen)
    assert len(seen) > 15
    assert {model.__name__ for model in seen if model.model_config.get("ser_json_inf_nan") != "strings"} == set()


def test_a_document_is_one_line_of_ascii() -> None:
    data = encode(End(run="größe\u2028", token=1, kind="Done", reason="a\nb", by="supervisor"))
    assert data.isascii()
    assert data.count(b"\n") == 1
    assert decode(data, End, "e").run == "größe\u2028"


def test_half_a_surrogate_pair_is_written_and_read() -> None:
    """Names of files may hold one."""
    claim = Claim(run="r", token=1, who={"name": "\udcff", "loss": math.nan})
    found = decode(encode(claim), Claim, "c")
    assert found.who == {"name": "\udcff", "loss": "NaN"}


def test_what_is_null_is_left_out_but_not_of_the_callers_own_json() -> None:
    body = json.loads(encode(manifest(meta={"a": None})))["body"]
    assert body["meta"] == {"a": None}
    assert "parent" not in body


def str_of(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def visit(model: Any, seen: set[type[BaseModel]]) -> None:
    """All models that the fields of one are made of."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        if model not in seen:
            seen.add(model)
            for field in model.model_fields.values():
                visit(field.annotation, seen)
        return
    for inner in get_args(model):
        visit(inner, seen)
