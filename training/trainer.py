"""One job made ready to train: model, optimizer, data and the single optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from training.checkpoint.manifest import Position
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import open_store
from training.config import JobConfig
from training.data import Schedule, load_batches, share, to_device
from training.errors import Invalid
from training.job import load_job
from training.parallel.clip import clip_gradients
from training.randomness import preserved_randomness, seed_everything, seed_of_rank
from training.state import TrainingState, apply_model, finite_paths, unwrapped
from training.stopping import GroupStop, StopRequest

if TYPE_CHECKING:
    from training.parallel.local import LocalSteps
    from training.parallel.ranks import Ranks

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Step(NamedTuple):
    """An optimizer step that is done, and what all ranks know of it.

    Attributes:
        position: what comes next.
        loss: over all of its samples; a 0-dim tensor.
        learning_rate: of the first parameter group, for the step after it; None: the step is not one to be logged.
    """

    position: Position
    loss: Tensor
    learning_rate: float | None


class Trainer:
    """Everything that one training process holds. Building it sets the process's seeds and thread count.

    Raises:
        Invalid: the job, its parameters, its data or its state cannot be trained and saved.
    """

    def __init__(self, config: JobConfig, data_folder: Path | None, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks
        self.device = ranks.device if ranks is not None else device_of(config)
        torch.set_num_threads(config.threads)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = False  # picks kernels by time, which changes results
            torch.backends.cudnn.deterministic = True
        seed_everything(config.seed)
        self.job = load_job(config.job, config.params, data_folder)
        self.model = self.job.model()
        if ranks is None or config.parallel.pipeline == 1:  # a device of one stage need not hold the whole
            self.model.to(self.device)
        if config.init_from is not None:
            _start_from(self.model, config)
        self.pipeline, residuals, division = None, None, None
        if ranks is not None:
            from training.parallel.wrap import cut  # one rank alone never pays for it

            found = cut(self.model, self.job, ranks, config, self._autocast)
            self.model, self.pipeline = found.model, found.pipeline
            residuals, division = found.residuals, found.division
        self.local: LocalSteps | None = None
        if config.parallel.local_steps > 1:
            from training.parallel.local import LocalSteps

            self.local = LocalSteps(self.model, config.parallel, ranks.size if ranks is not None else 1)
        self._unagreed: list[Step] = []
        self.optimizer = self.job.optimizer(self.model)
        self.dataset = self.job.train_data()
        samples = len(cast("Any", self.dataset))
        if samples == 0:
            raise Invalid(f"{config.job} has no training samples")
        self.schedule = Schedule(samples, config.batch_size, config.accumulate_batches)
        scheduler = self.job.scheduler(self.optimizer, self.total_steps)
        self.scaler = torch.amp.GradScaler(self.device.type) if config.precision == "fp16" else None
        self.state = TrainingState(
            self.model, self.optimizer, scheduler, self.scaler, ranks, residuals, self.local, division
        )
        self.model.train()
        self.seed()  # again: what model() drew must not matter for what follows

    @property
    def rank(self) -> int:
        """In the group; 0 for one rank alone."""
        return self.ranks.rank if self.ranks is not None else 0

    @property
    def must_be_finite(self) -> list[str]:
        """Keys of the tensors that a healthy state has no NaN or infinity in."""
        return finite_paths(self.model)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.schedule.steps_per_epoch * self.config.epochs

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Whose steps change the state."""
        return (self.optimizer, *(self.local.outer_optimizers if self.local is not None else ()))

    @property
    def is_synchronised(self) -> bool:
        """Whether all ranks have the same weights now: what can be saved, evaluated and left."""
        return self.local is None or self.local.is_synchronised

    @property
    def round_steps(self) -> int:
        """Steps until that is so again, at most."""
        return 1 if self.local is None else self.local.round_steps

    def start(self, position: Position) -> None:
        """The state is at `position` now: train from there."""
        if self.local is not None:
            self.local.start(position.step)

    def seed(self) -> None:
        """The generators as a rank has them that is new at this point: each rank its own."""
        seed_everything(seed_of_rank(self.config.seed, self.ranks.seat if self.ranks is not None else 0))

    def batches(self, position: Position) -> Iterator[Any]:
        """Micro-batches of the rest of the position's epoch."""
        return load_batches(
            self.dataset,
            seed=self.config.seed,
            epoch=position.epoch,
            offset=self.schedule.offset(position),
            batch_size=self.config.batch_size,
            workers=self.config.loader_workers,
            rank=self._data_rank,
            world_size=self._data_ranks,
            pin_memory=self.device.type == "cuda",
        )

    def optimizer_step(self, batches: Iterator[Any], window_samples: int) -> Tensor:
        """One step on the mean loss over `window_samples` samples, however they fall into micro-batches.

        A short last window divides by its own size, so that each step is a step on a plain mean.

        Returns:
            The loss, a 0-dim tensor on the device; reading it waits for the device.
        """
        if self.ranks is not None and self.is_synchronised:
            self.ranks.own_time.begin()
        self.optimizer.zero_grad(set_to_none=True)
        model, scale = self._replica_and_scale(window_samples)
        if self.pipeline is not None:
            self.pipeline.begin()
        total = torch.zeros((), device=self.device)
        left = window_samples
        while left > 0:
            count = min(self.config.batch_size, left)
            left -= count
            batch = to_device(next(batches), self.device)
            own = self._share(count)
            if self.pipeline is not None:
                total += self.pipeline.step(batch, own, window_samples, last=left == 0)
                continue
            # of this rank's samples the mean, by its share of the window: the sum over all ranks is a plain mean
            weight = own / window_samples
            with self._syncing(last=left == 0):
                with self._autocast():
                    loss = self.job.loss(model, batch) * weight
                scaled = loss * scale
                self._backward(self.scaler.scale(scaled) if self.scaler else scaled, model)
            total += loss.detach()
        self._apply_gradients()
        return total

    def synchronises(self, position: Position) -> bool:
        """Whether local steps end with the one that led to `position`."""
        return self.local is not None and self.local.synchronises(last=self.schedule.offset(position) == 0)

    def agree(self, position: Position, loss: Tensor, stop: StopRequest) -> list[Step]:
        """The step that led to `position` is done: what do all ranks know now? Also whether one is asked to stop.

        Returns:
            The steps since they agreed last; none where each rank goes on for itself.
        """
        logged = position.step % self.config.log_every_steps == 0
        self._unagreed.append(Step(position, loss, self.learning_rate() if logged else None))
        if self.local is not None:
            self.local.stepped(last=self.schedule.offset(position) == 0)
            if not self.local.is_synchronised:
                return []
        steps, self._unagreed = self._unagreed, []
        if self.ranks is None:
            return steps
        wish = isinstance(stop, GroupStop) and stop.wished
        losses, stop.asked = self.ranks.reduce(torch.stack([step.loss for step in steps]), wish)
        return [step._replace(loss=loss) for step, loss in zip(steps, losses.unbind(), strict=True)]

    def evaluate(self, stop: StopRequest | None = None) -> dict[str, float] | None:
        """Metrics of the job; None if `stop` came first. Generators and the modules' modes stay as they were."""
        stop = stop or StopRequest()
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(), preserved_randomness(), self._autocast():
                metrics = stop.unless_asked(lambda: self.job.evaluate(unwrapped(self.model)))
            return None if metrics is None else {name: float(value) for name, value in metrics.items()}
        finally:
            for module, mode in modes:
                module.training = mode

    def learning_rate(self) -> float:
        """Of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _backward(self, loss: Tensor, model: torch.nn.Module) -> None:
        if self.ranks is not None:
            self.ranks.own_time.backward(loss, model)
        else:
            cast("Callable[[], None]", loss.backward)()

    def _apply_gradients(self) -> None:
        if self.config.clip_grad_norm is not None:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            clip_gradients(self.model.parameters(), self.config.clip_grad_norm, self.pipeline)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.state.scheduler:
            self.state.scheduler.step()

    @property
    def _data_rank(self) -> int:
        return self.ranks.data_rank if self.ranks is not None else 0

    @property
    def _data_ranks(self) -> int:
        return self.config.parallel.data_ranks if self.ranks is not None else 1

    def _share(self, count: int) -> int:
        return share(count, self._data_rank, self._data_ranks)

    @property
    def _sums_gradients(self) -> bool:
        return self.ranks is not None and (self.local is None or self.local.sums_gradients)

    def _replica_and_scale(self, window_samples: int) -> tuple[torch.nn.Module, float]:
        """What takes the next step on this rank, and the factor of its share of the loss.

        Summed gradients are averaged over the ranks. A rank that steps for itself takes its own samples' mean.
        """
        if self._sums_gradients or self.local is None:
            return self.model, self._data_ranks
        from training.parallel.wrap import replica

        whole, rest = divmod(window_samples, self.config.batch_size)
        own = whole * self._share(self.config.batch_size) + self._share(rest)
        return replica(self.model), window_samples / max(own, 1)

    def _syncing(self, *, last: bool) -> AbstractContextManager[Any]:
        if not self._sums_gradients:
            return nullcontext()
        from training.parallel.wrap import without_sync

        return without_sync(self.model, last=last)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.config.precision)
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def device_of(config: JobConfig) -> torch.device:
    """Where one rank alone trains.

    Raises:
        Invalid: a GPU is asked for, and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise Invalid("device is cuda, but torch sees no GPU", hint="--set device=cpu, or check nvidia-smi")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _start_from(model: torch.nn.Module, config: JobConfig) -> None:
    source = config.init_from
    assert source is not None  # noqa: S101 - the caller looked
    state = restore_checkpoint(open_store(source.store_url), source.token, source.sequence, source.run)
    apply_model(model, state["model"])
