"""Whether a job is worth training again: the champion's data against the data of today."""

from __future__ import annotations

from infra.mlflow_models import CHECKPOINT
from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_text import RUN, STORE
from infra.settings import Settings
from tasks.data import ensure_data
from tasks.register import CHAMPION
from training.config import Frozen, InitFrom, load_config
from training.errors import Invalid

DATA_DIGEST = "retoma.data_digest"


class Verdict(Frozen):
    """What to do and why. `init_from` is the champion's checkpoint; None starts from fresh weights."""

    due: bool
    reason: str
    init_from: InitFrom | None = None


def judge_champion(
    settings: Settings, registry: MlflowRegistry, job: str, overrides: list[str], model: str | None = None
) -> Verdict:
    """Compare the data that the champion of a job was trained on with the data that DVC has on record now.

    Raises:
        Invalid: the job names no data set, its data is damaged, or the champion was registered by hand.
        Unavailable: MLflow does not answer.
    """
    config = load_config(settings.home / job, overrides)
    if config.data is None:
        raise Invalid(f"{job} names no data set, so nothing can tell when to train again", hint="use force=true")
    digest = ensure_data(settings.home, config.data).digest
    name = model or config.short_name
    champion = registry.models.with_alias(name, CHAMPION)
    if champion is None:
        return Verdict(due=True, reason=f"model {name} has no champion yet: training from fresh weights")
    label = f"champion {name}/{champion.number} (run {champion.tags.get(RUN, '?')})"
    before = champion.tags.get(DATA_DIGEST)
    init_from = champion_checkpoint(champion.tags, label)
    if before == digest:
        return Verdict(due=False, reason=f"{label} was trained on this data already: {digest}", init_from=init_from)
    return Verdict(
        due=True, reason=f"the data changed from {before} to {digest}; starting from {label}", init_from=init_from
    )


def champion_checkpoint(tags: dict[str, str], label: str) -> InitFrom:
    """The checkpoint that a registered version stands for."""
    place, _, _ = tags.get(CHECKPOINT, "").partition(" ")
    token, _, sequence = place.partition("/")
    if not (token.isdigit() and sequence.isdigit() and tags.get(RUN) and tags.get(STORE)):
        raise Invalid(f"{label} names no checkpoint", hint="only versions that `retoma train` registered do")
    return InitFrom(store_url=tags[STORE], run=tags[RUN], token=int(token), sequence=int(sequence))
