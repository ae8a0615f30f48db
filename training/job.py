"""What a user writes: one class in one file, named by its import path in a YAML file."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError

from training.config import Frozen, explain
from training.errors import Invalid

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


class Params(Frozen):
    """Base of a job's own parameters: the `params:` section of its YAML file."""


P = TypeVar("P", bound=Params)


class Job(ABC, Generic[P]):
    """One training task. Subclass it, set `Params`, and fill in the abstract methods.

    Randomness: `train_data()[i]` may use `random`, `numpy.random` and `torch` freely. The three are seeded
    from (seed, epoch, i) around each item, so that an item is the same in every resume and in every loader
    worker. `model()` is called once with the run's seed set.

    Attributes:
        params: the validated `params:` section.
        data: the folder of the data set, verified against its DVC digest; None if the job names none.
    """

    Params: ClassVar[type[Params]] = Params

    def __init__(self, params: P, data: Path | None) -> None:
        self.params = params
        self.data = data

    @abstractmethod
    def model(self) -> nn.Module:
        """A freshly initialised model on the CPU."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's parameters.

        A rank of a pipeline is given its stages as one module: take parameters by name, and make as many groups.
        """

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """A learning-rate scheduler, stepped after each of `total_steps` optimizer steps; None for none."""
        del optimizer, total_steps
        return None

    @abstractmethod
    def train_data(self) -> Dataset[Any]:
        """A map-style data set: `len()` and `[index]`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of one collated micro-batch that is already on the model's device; a 0-dim tensor."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated parts of the model, in order: FSDP gathers them, and recomputing takes them, one by one."""
        del model
        return []

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        """Module name -> `ParallelStyle` of `torch.distributed.tensor.parallel`, for `parallel.tensor`."""
        del model
        return {}

    def sequence_plan(self, model: nn.Module, ranks: int) -> dict[str, Any]:
        """As `tensor_plan`, all of it, for `parallel.sequence`: between the layers that `ranks` ranks share, each
        of them holds a part of the sequence (`SequenceParallel`, `PrepareModuleInput`, `PrepareModuleOutput`).
        """
        del model, ranks
        return {}

    def stages(self, model: nn.Module, count: int) -> list[nn.Module]:
        """The model cut into `count` modules that are called one after the other, for `parallel.pipeline`.

        Each is made of modules of `model` itself, not of copies, and under the same names: a parameter is called
        `blocks.3.norm.weight` in its stage, too. The first is called with `inputs(batch)`; each following one with
        what the one before returned, a tensor or a tuple of them. A tensor that two stages share is kept alike.
        """
        del model, count
        return []

    def inputs(self, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """What a pipeline's first stage is called with; samples are the first dimension of each tensor."""
        raise NotImplementedError

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Mean loss of the output of a pipeline's last stage for one collated batch; a 0-dim tensor."""
        raise NotImplementedError

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model in eval mode on data that it was not trained on.

        Every rank of a group calls it and does the same. In a pipeline the model can be called, and nothing else.
        """


def load_job(path: str, params: dict[str, Any], data: Path | None) -> Job[Any]:
    """Import `module:Class` and build the job with validated parameters.

    Raises:
        Invalid: the module or class is missing, is no `Job`, or a parameter is wrong.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Invalid(
            f"job {path!r}: no module {error.name!r}",
            hint="name it as package.module:Class, importable from the project's root",
        ) from error
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Job)):
        found = sorted(k for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Job))
        raise Invalid(f"job {path!r}: {class_name!r} is not a training.job.Job; {module_name} has {found}")
    try:
        checked = cls.Params.model_validate(params)
    except ValidationError as error:
        raise Invalid(f"params of {path}: {explain(error, cls.Params)}") from error
    return cls(checked, data)
