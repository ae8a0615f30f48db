"""Where the profiles of a range wait until they are in MLflow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.config import JobConfig


@contextmanager
def profile_folder(config: JobConfig) -> Iterator[Path | None]:
    """A folder that is removed at the end; None where nothing is to be profiled."""
    if config.profile is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="retoma-profile-") as folder:
        yield Path(folder)
