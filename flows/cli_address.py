"""What RUN may be on the command line: the name of a run, or the address of a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infra.settings import Settings
from tasks.plan import check_run_name
from tasks.runs import find_run
from training.checkpoint.adapters.address import parse_checkpoint
from training.checkpoint.history import Lineage, read_lineage
from training.checkpoint.store import open_store
from training.checkpoint.token import MARKER_KEY, run_of, token_numbers
from training.errors import Invalid

if TYPE_CHECKING:
    from training.checkpoint.store import Store

RUN_HELP = "Name of the run, or the address of its store: a folder or s3://bucket/prefix."


class Opened(NamedTuple):
    """A run's store. `address` is what a person types to name it again."""

    run: str
    address: str
    store_url: str
    store: Store

    def lineage(self) -> Lineage:
        """The run's history."""
        return read_lineage(self.store)


def open_run(settings: Settings, name: str) -> Opened:
    """The store of a run that is there.

    Raises:
        Invalid: there is none; names those that sound alike.
    """
    export_s3(settings)
    if _is_address(name) or not _is_known(settings, name):
        store_url = name if "://" in name else str(Path(name).expanduser().absolute())
        store = open_store(store_url)
        run = run_of(store)
        if run is None and not token_numbers(store)[0]:
            raise Invalid(
                f"{name} holds no run", hint="give the folder that has retoma.json in it, or: retoma runs"
            )
        return Opened(run or "", name, store_url, store)
    store_url = settings.run_url(name)
    return Opened(name, name, store_url, open_store(store_url))


def new_or_open(settings: Settings, name: str) -> tuple[str | None, str]:
    """Name and address of a store that need not be there yet. The name of a store at an address is its own."""
    export_s3(settings)
    if _is_address(name):
        return None, name if "://" in name else str(Path(name).expanduser().absolute())
    return check_run_name(name), settings.run_url(name)


def the_checkpoint(text: str | None) -> tuple[int, int] | None:
    """Token and sequence of an option that may be left out."""
    return parse_checkpoint(text) if text is not None else None


def export_s3(settings: Settings) -> None:
    """Tell S3's client in this process and in its children which server it is."""
    os.environ.update(settings.s3_variables())


def _is_address(name: str) -> bool:
    return "/" in name or name.startswith((".", "~"))


def _is_known(settings: Settings, name: str) -> bool:
    """Whether it is a run's name. If it is a folder with a store in it, it is not; else the error names others."""
    if run_of(open_store(settings.run_url(name))) is not None:  # asked directly: a bucket may hold a million keys
        return True
    if (Path(name) / MARKER_KEY).is_file():
        return False
    find_run(settings, name)  # raises
    return True
