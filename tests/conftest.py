"""Real stacks for all tests that need one: each of two groups of tests stays on one worker of pytest-xdist."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from infra.stack import down, up

HERE = Path(__file__).parent
ROOT = HERE.parent
JOB = "training/jobs/mnist_cnn.yaml"
STEPS_PER_EPOCH = 32
SMALL = {
    "epochs": 2,
    "epochs_per_range": 1,
    "batch_size": 125,
    "threads": 1,
    "log_every_steps": 4,
    "checkpoint.every_steps": 4,
}

STRAIGHT = """
import json, sys
from pathlib import Path
from training.config import load_config
from training.session import train_range
config = load_config(sys.argv[1], sys.argv[4:])
print(train_range(config, sys.argv[2], "straight", data_folder=Path(sys.argv[3])).state_digest)
"""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", ())
        if HERE / "end_to_end" in item.path.parents or "stack_settings" in names:
            item.add_marker(pytest.mark.end_to_end)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group("stack"))


@pytest.fixture(scope="session")
def stack_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a stack of its own in a temporary folder; whatever runs there ends with the session."""
    settings = Settings(home=ROOT, state_dir=tmp_path_factory.mktemp("retoma"))
    try:
        yield settings
    finally:
        down(settings)
        left = ProcessTable(settings.state_dir).members()
        assert not left, f"processes left behind: {left}"


@pytest.fixture
def stack(stack_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A stack that is up, however the test before left it; commands started by the test find it, too."""
    monkeypatch.setenv("RETOMA_HOME", str(stack_settings.home))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(stack_settings.state_dir))
    up(stack_settings)
    return stack_settings


@pytest.fixture(scope="session")
def straight_digest(tmp_path_factory: pytest.TempPathFactory, stack_settings: Settings) -> str:
    """State digest of the same training in one process, with neither Prefect nor MLflow, never interrupted."""
    from tasks.data import ensure_data

    version = ensure_data(stack_settings.home, "data/mnist")
    store = tmp_path_factory.mktemp("straight") / "store"
    changes = [f"{key}={value}" for key, value in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "-c", STRAIGHT, JOB, str(store), str(stack_settings.home / version.path), *changes],
        cwd=stack_settings.home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
