import json
import os
from pathlib import Path

import pytest

from infra.settings import TELEMETRY_OFF, Settings, find_home, load_settings
from training.errors import Invalid, Unavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_retoma_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("RETOMA_"):
            monkeypatch.delenv(name)


def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    (tmp_path / "stack.json").write_text(json.dumps({"prefect": 4200, "mlflow": 5000}))
    return load_settings()


def test_defaults_live_below_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "training")
    settings = load_settings()
    assert settings.home == ROOT
    assert settings.state_dir == ROOT / ".retoma"
    assert settings.checkpoints_url == str(ROOT / ".retoma" / "checkpoints")
    assert settings.mlflow_experiment == "retoma"


def test_outside_of_any_project_the_installed_one_is_home(tmp_path: Path) -> None:
    assert find_home(tmp_path) == ROOT


def test_a_pyproject_of_another_project_is_not_home(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert find_home(tmp_path) == ROOT
    (tmp_path / "pyproject.toml").write_text("not = [toml")
    assert find_home(tmp_path) == ROOT


def test_the_nearest_project_wins_over_the_installed_one(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "retoma"\n')
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert find_home(tmp_path / "a" / "b") == tmp_path


def test_the_environment_sets_fields_and_what_follows_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("RETOMA_GPU_LIMIT", "2")
    settings = load_settings()
    assert settings.checkpoints_url == str(tmp_path / "checkpoints")
    assert settings.gpu_limit == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("file:///a/b%20c", "/a/b c"),
        ("/a/b/", "/a/b"),
        ("s3://bucket/prefix/", "s3://bucket/prefix"),
    ],
)
def test_checkpoint_urls_are_normalised(given: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOMA_CHECKPOINTS_URL", given)
    assert load_settings().checkpoints_url == kept
    assert load_settings().run_url("r1") == f"{kept}/r1"


@pytest.mark.parametrize(
    ("variable", "value", "near"),
    [
        ("RETOMA_STATEDIR", "x", "RETOMA_STATE_DIR"),
        ("RETOMA_MLFLOW_URI", "http://x", "RETOMA_MLFLOW_URL"),
        ("RETOMA_Q", "x", "RETOMA_"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(
    variable: str, value: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid, match=f"unknown variable {variable}; did you mean {near}"):
        load_settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RETOMA_GPU_LIMIT", "none"),
        ("RETOMA_CHECKPOINTS_URL", "ftp://host/x"),
        ("RETOMA_PREFECT_API_URL", "localhost:4200/api"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid, match=rf"{variable}: .*{value!r}"):
        load_settings()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RETOMA_PROGRESS_WITHIN_SECONDS": "9"}, "greater than or equal to 10"),
        ({"RETOMA_PROGRESS_WITHIN_SECONDS": "11"}, "at least server_restart_seconds and a beat, 12 s"),
        ({"RETOMA_SERVER_RESTART_SECONDS": "40"}, "RETOMA_PROGRESS_WITHIN_SECONDS must be at least"),
        ({"RETOMA_HEARTBEAT_WITHIN_SECONDS": "60"}, "at least 2.5 times heartbeat_seconds, 75 s"),
        ({"RETOMA_HEARTBEAT_SECONDS": "60"}, "RETOMA_HEARTBEAT_WITHIN_SECONDS must be at least"),
        ({"RETOMA_HEARTBEAT_SECONDS": "10"}, "greater than or equal to 30"),
        (
            {"RETOMA_SERVER_RESTART_SECONDS": "61", "RETOMA_PROGRESS_WITHIN_SECONDS": "99"},
            "RETOMA_PENDING_WITHIN_SECONDS must be at least server_restart_seconds, 61 s",
        ),
    ],
)
def test_a_window_that_would_declare_healthy_runs_dead_is_refused_by_name(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Invalid, match=words):
        load_settings()


def test_without_servers_the_error_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    with pytest.raises(Unavailable) as caught:
        load_settings().prefect_url()
    assert "retoma up" in (caught.value.hint or "")
    assert "RETOMA_PREFECT_API_URL" in (caught.value.hint or "")


def test_the_local_stack_gives_the_urls_unless_they_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = local(tmp_path, monkeypatch)
    assert settings.prefect_url() == "http://127.0.0.1:4200/api"
    assert settings.tracking_url() == "http://127.0.0.1:5000"
    monkeypatch.setenv("RETOMA_MLFLOW_URL", "https://mlflow.example/")
    assert load_settings().tracking_url() == "https://mlflow.example"


def test_children_get_no_telemetry_and_no_foreign_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = local(tmp_path, monkeypatch)
    shell = {
        "PATH": "/bin",
        "PREFECT_API_KEY": "secret",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql://elsewhere",
        "MLFLOW_TRACKING_URI": "http://elsewhere",
        "PREFECT_LOGGING_LEVEL": "DEBUG",
    }
    child = settings.environment(shell)
    assert child.items() >= TELEMETRY_OFF.items()
    assert child["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert child["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert child["PREFECT_LOGGING_LEVEL"] == "DEBUG"
    assert child["PATH"] == "/bin"
    assert not {"PREFECT_API_KEY", "PREFECT_SERVER_DATABASE_CONNECTION_URL"} & child.keys()


def test_children_keep_the_credentials_of_a_server_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(tmp_path, monkeypatch)
    monkeypatch.setenv("RETOMA_PREFECT_API_URL", "https://prefect.example/api")
    child = load_settings().environment({"PREFECT_API_KEY": "key"})
    assert child["PREFECT_API_KEY"] == "key"
    assert child["PREFECT_API_URL"] == "https://prefect.example/api"


def test_a_child_reads_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = local(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name, value in settings.variables().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_every_client_of_s3_gets_the_endpoint_and_the_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(tmp_path, monkeypatch)
    monkeypatch.setenv("RETOMA_S3_ENDPOINT_URL", "http://127.0.0.1:8333/")
    monkeypatch.setenv("RETOMA_S3_REGION", "eu-central-1")
    child = load_settings().environment({"AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "us-east-1"})
    assert child["AWS_ENDPOINT_URL_S3"] == "http://127.0.0.1:8333"
    assert child["AWS_REGION"] == child["AWS_DEFAULT_REGION"] == "eu-central-1"
    assert child["AWS_ACCESS_KEY_ID"] == "key"
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert load_settings().s3_endpoint_url == "http://127.0.0.1:8333"
    assert load_settings().s3_region == "eu-central-1"


def test_without_s3_settings_what_the_user_has_set_for_aws_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = local(tmp_path, monkeypatch)
    assert not [name for name in settings.variables() if name.startswith("AWS_")]
    shell = {"AWS_REGION": "us-west-2", "AWS_ENDPOINT_URL_S3": "http://elsewhere"}
    assert settings.environment(shell).items() >= shell.items()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RETOMA_CHECKPOINTS_URL", "s3://name:hushhush@bucket/x"),
        ("RETOMA_S3_ENDPOINT_URL", "http://name:hushhush@host"),
        ("RETOMA_S3_REGION", "not a region"),
    ],
)
def test_a_password_in_a_url_is_neither_accepted_nor_repeated(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid, match=variable) as caught:
        load_settings()
    assert "hushhush" not in f"{caught.value} {caught.value.__cause__}"
