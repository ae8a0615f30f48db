"""Maintenance of runs: compaction and collection, with what the registry knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.mlflow_models import CHECKPOINT
from infra.mlflow_registry import MlflowRegistry
from infra.settings import Settings
from tasks.retain import Care, registered_checkpoints, retain
from tests.support.chains import RUN, Chains, names
from tests.support.faults import run_script
from training.checkpoint.chain import read_chain
from training.checkpoint.store import open_store
from training.errors import Invalid, Unavailable

NOW = Care(keep=1, grace_seconds=0.0, max_links=4)


class Page(list[Any]):
    token: str | None = None


class Versions:
    """The part of MLflow that is asked, page by page. `tags` are those of registered versions of one run."""

    def __init__(self, tags: list[dict[str, str]], error: Exception | None = None) -> None:
        self._rows = [SimpleNamespace(name="m", version=n, tags=one) for n, one in enumerate(tags)]
        self._error = error
        self.runs, self.connection = self, self

    def parent(self, run: str) -> Any:
        return SimpleNamespace(id=f"id of {run}")

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[Any]:
        if self._error is not None:
            raise self._error
        yield self

    def search_model_versions(self, query: str, max_results: int, page_token: str | None) -> Page:
        assert query.startswith("run_id = 'id of ")
        start = int(page_token or 0)
        page = Page(self._rows[start : start + 1])
        page.token = str(start + 1) if start + 1 < len(self._rows) else None
        return page


def registry(*tags: dict[str, str], error: Exception | None = None) -> MlflowRegistry:
    return cast("MlflowRegistry", Versions(list(tags), error))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, state_dir=tmp_path, checkpoints_url=str(tmp_path / "runs"))


@pytest.fixture
def chains(settings: Settings) -> Chains:
    chains = Chains(open_store(settings.run_url(RUN)))
    chains.attempt("bdbddddd")
    return chains


def test_a_long_chain_is_compacted_and_old_checkpoints_go(settings: Settings, chains: Chains) -> None:
    (done,) = retain(settings, registry(), None, NOW)
    assert (done.run, done.compacted, done.errors, done.waiting) == (RUN, "000001/00000007", (), "")
    assert len(read_chain(chains.store, 1, 7).contents) == 1
    assert done.collected == 2
    assert done.freed_bytes > 0
    assert chains.restorable() == names(1, range(2, 8))


def test_registered_versions_stay_whatever_their_alias(settings: Settings, chains: Chains) -> None:
    tags = [{CHECKPOINT: "000001/00000001 xxh3_128:ab"}, {CHECKPOINT: "000001/00000004 xxh3_128:cd"}]
    assert registered_checkpoints(registry(*tags), RUN) == {(1, 1), (1, 4)}
    retain(settings, registry(*tags), [RUN], NOW)
    assert chains.restorable() == names(1, range(8))


@pytest.mark.parametrize(
    ("tags", "error"),
    [([], Unavailable("no answer")), ([{"who": "registered by hand"}], None), ([], Invalid("refused"))],
)
def test_while_the_registry_is_not_known_nothing_is_deleted_and_compaction_goes_on(
    settings: Settings, chains: Chains, tags: list[dict[str, str]], error: Exception | None
) -> None:
    (done,) = retain(settings, registry(*tags, error=error), None, NOW)
    assert done.compacted == "000001/00000007"
    assert done.errors[0].startswith("not collected: ")
    assert (done.collected, done.freed_bytes) == (0, 0)
    assert chains.restorable() == names(1, range(8))


def test_a_damaged_run_does_not_stop_the_next(settings: Settings, chains: Chains) -> None:
    other = Chains(open_store(settings.run_url("a")))
    other.attempt("bb")
    other.damage("tokens/000001.seal.json")
    damaged, whole = retain(settings, registry(), ["a", RUN], NOW.model_copy(update={"keep": 3}))
    assert "not collected: Corrupt" in str(damaged)
    assert whole.errors == ()
    assert other.restorable() == names(1, (0, 1))


def test_a_dry_run_changes_nothing(settings: Settings, chains: Chains) -> None:
    before = chains.listing()
    (done,) = retain(settings, registry(), None, NOW.model_copy(update={"dry_run": True}))
    assert done.collected > 0
    assert chains.listing() == before


def test_maintenance_needs_no_torch() -> None:
    run_script("import sys, flows.retain; assert 'torch' not in sys.modules")
