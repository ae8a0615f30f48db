"""What of a store no checkpoint needs. Decides from a survey; deletes nothing."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from training.checkpoint.care.survey import Listed, Survey
from training.checkpoint.collected import Name
from training.checkpoint.manifest import Manifest
from training.checkpoint.store import Aged


@dataclass
class Sweep:
    """Garbage, in the order in which it is to be deleted.

    Attributes:
        manifests: newest first, so that what is left is never a child without its parent.
        forms: rebased manifests of checkpoints that go.
        packs: of checkpoints that go, of saves that failed, of originals that only their rebased form stands for.
        form_packs: of rebased forms that go, or that were never finished.
        in_flight: packs of a save that may be going on; not garbage.
    """

    manifests: dict[Name, Aged] = field(default_factory=dict)
    forms: dict[Name, Aged] = field(default_factory=dict)
    packs: list[Listed] = field(default_factory=list)
    form_packs: list[Listed] = field(default_factory=list)
    in_flight: int = 0


def sweep(survey: Survey, live: AbstractSet[Name]) -> Sweep:
    """Everything but the live checkpoints, and what may be on its way.

    Args:
        survey: the store.
        live: checkpoints that stay; closed under what they need.
    """
    found = Sweep()
    for name in sorted(survey.manifests.keys() - live, reverse=True):
        if name[0] <= survey.newest_seal:
            found.manifests[name] = survey.manifests[name]
    for name in sorted(survey.forms.keys() - live, reverse=True):
        found.forms[name] = survey.forms[name]
    newest = max((sequence for token, sequence in survey.manifests if token == survey.newest_seal), default=-1)
    for listed in survey.packs.values():
        if listed.name not in survey.manifests and listed.name > (survey.newest_seal, newest):
            found.in_flight += 1
        elif listed.name not in live or _only_its_form_counts(survey, listed.name):
            found.packs.append(listed)
    for listed in survey.form_packs.values():
        form = survey.form(listed.name)
        if listed.name not in live or form is None or (isinstance(form, Manifest) and form.nonce != listed.nonce):
            found.form_packs.append(listed)
    return found


def _only_its_form_counts(survey: Survey, name: Name) -> bool:
    """Whether what the original is built on was collected."""
    return survey.has_form(name) and survey.parent(name) in survey.collected.names
