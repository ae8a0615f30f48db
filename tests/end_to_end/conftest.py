"""One real stack for all end-to-end tests: they stay on one worker of pytest-xdist and share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from infra.stack import down, up

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.end_to_end)
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
