"""The automations: which events they wait for, and how they come onto a server. See end_to_end/test_net."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.server.events.actions import RunDeployment
from prefect.server.events.schemas import automations as server_side
from prefect.server.utilities.user_templates import UserTemplateEnvironment as Environment

from infra.automations import COPIED, HEARTBEAT, PARENTS, PREFIX, SUPERSEDED, apply, wanted
from infra.beat import EVENT
from infra.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path)


class Server:
    """Keeps automations in memory, and remembers what was done to them."""

    def __init__(self) -> None:
        self.stored: dict[UUID, Automation] = {}
        self.calls: list[str] = []

    def read_automations(self) -> list[Automation]:
        return list(self.stored.values())

    def create_automation(self, automation: AutomationCore) -> UUID:
        self.calls.append("create")
        id_ = uuid4()
        self.stored[id_] = Automation(id=id_, **automation.model_dump())
        return id_

    def update_automation(self, automation_id: UUID, automation: AutomationCore) -> None:
        self.calls.append("update")
        self.stored[automation_id] = Automation(id=automation_id, **automation.model_dump())

    def delete_automation(self, automation_id: UUID) -> None:
        self.calls.append("delete")
        del self.stored[automation_id]


def put(server: Server, settings: Settings) -> list[str]:
    return apply(server, wanted(settings))  # type: ignore[arg-type]


def by_name(settings: Settings) -> dict[str, Any]:
    return {document["name"].removeprefix(PREFIX): document for document in wanted(settings)}


def render(template: str, parameters: dict[str, Any]) -> Any:
    """As the server does it."""
    typed = RunDeployment._wrap_v1_template(template)["value"]["template"]
    return json.loads(Environment().from_string(typed).render(flow_run={"parameters": parameters}))


def test_the_same_again_writes_nothing(settings: Settings) -> None:
    server = Server()
    assert len(put(server, settings)) == len(wanted(settings))
    server.calls.clear()
    assert put(server, settings) == []
    assert server.calls == []


def test_a_changed_window_updates_one_automation_under_its_id(settings: Settings) -> None:
    server = Server()
    put(server, settings)
    ids = set(server.stored)
    changed = put(server, settings.model_copy(update={"progress_within_seconds": 60.0}))
    assert changed == [f"{PREFIX}progress lost"]
    assert set(server.stored) == ids


def test_what_a_person_switched_off_stays_off_and_what_is_not_ours_is_not_touched(settings: Settings) -> None:
    server = Server()
    put(server, settings)
    mine = next(iter(server.stored.values()))
    mine.enabled = False
    other = server.create_automation(
        AutomationCore.model_validate({**wanted(settings)[0], "name": "progress lost"})
    )
    assert put(server, settings.model_copy(update={"progress_within_seconds": 60.0})) == [mine.name]
    assert not server.stored[mine.id].enabled
    assert other in server.stored


def test_twins_and_those_of_an_older_version_are_deleted(settings: Settings) -> None:
    server = Server()
    put(server, settings)
    document = wanted(settings)[0]
    for name in (document["name"], f"{PREFIX}of long ago"):
        server.create_automation(AutomationCore.model_validate({**document, "name": name}))
    assert sorted(put(server, settings)) == [f"{PREFIX}of long ago", document["name"]]
    assert sorted(each.name for each in server.stored.values()) == sorted(each["name"] for each in wanted(settings))


def test_the_server_takes_them_as_they_are(settings: Settings) -> None:
    for document in wanted(settings):
        server_side.AutomationCore.model_validate(document)


def test_heartbeats_do_not_hide_a_loop_that_hangs(settings: Settings) -> None:
    found = by_name(settings)
    lost = found["progress lost"]["trigger"]
    assert lost["after"] == [EVENT]
    assert EVENT in lost["expect"]
    assert HEARTBEAT not in lost["expect"]
    assert HEARTBEAT in found["range silent"]["trigger"]["expect"]


@pytest.mark.parametrize("name", ["progress lost", "range silent", "parent silent"])
@pytest.mark.parametrize("state", ["Completed", "Failed", "Crashed", "Cancelled", "Cancelling", SUPERSEDED])
def test_a_flow_run_that_is_over_is_not_missed(settings: Settings, name: str, state: str) -> None:
    assert f"prefect.flow-run.{state}" in by_name(settings)[name]["trigger"]["expect"]


def test_a_parent_that_the_command_replaces_is_not_replaced_by_the_server_too(settings: Settings) -> None:
    for flow in PARENTS:
        events = by_name(settings)[f"{flow} crashed"]["trigger"]["expect"]
        assert events == ["prefect.flow-run.Crashed"]
        assert f"prefect.flow-run.{SUPERSEDED}" not in events


@pytest.mark.parametrize(
    ("given", "generation"), [({"generation": 2}, 3), ({}, 1), ({"run": None, "overrides": None}, 1)]
)
def test_a_new_parent_gets_the_parameters_of_the_old_one(
    settings: Settings, given: dict[str, Any], generation: int
) -> None:
    parameters = {"job": "a.yaml", "run": "r<1>", "overrides": ["seed=1"], **given}
    templates = by_name(settings)["train crashed"]["actions"][0]["parameters"]
    assert set(templates) == {*COPIED["train"], "generation"}
    for name, template in templates.items():
        assert render(template, parameters) == (generation if name == "generation" else parameters[name])


def test_a_parent_that_crashes_before_it_can_refuse_is_not_started_for_ever(settings: Settings) -> None:
    template = by_name(settings)["train crashed"]["actions"][0]["parameters"]["generation"]
    last = settings.parent_generations + 1  # it refuses
    assert render(template, {"generation": last - 1}) == last
    with pytest.raises(ZeroDivisionError):
        render(template, {"generation": last})


def test_every_parameter_of_a_parent_is_copied() -> None:
    from flows.retrain import retrain
    from flows.train import train

    for flow in (train, retrain):
        assert set(flow.parameters.properties) == {*COPIED[flow.name], "generation"}
