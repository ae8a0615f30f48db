"""The `parallel:` section of a job's YAML file. Knows no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, arXiv 2311.08105


class ParallelConfig(BaseModel):
    """How a training is cut over ranks. The default, one rank, is a single process that pays for none of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    world: int = Field(1, ge=1, description="ranks, which are processes")
    nodes: int = Field(1, ge=1, description="machines that share the ranks evenly")
    min_nodes: int | None = Field(
        None, ge=1, description="go on with so few of them, and with their ranks only; default: all"
    )
    gather_seconds: float = Field(60.0, gt=0, description="how long a group that begins waits for min_nodes")
    data: Literal["ddp", "fsdp", "hsdp"] = Field(
        "ddp", description="each data-parallel rank holds a replica, a shard, or a shard within its replica"
    )
    replicas: int = Field(1, ge=1, description="hsdp: replicas, each of which is sharded")
    tensor: int = Field(1, ge=1, description="ranks that share each layer, by the job's tensor_plan()")
    sequence: bool = Field(
        False, description="ranks that share layers hold a part of the sequence each between them: sequence_plan()"
    )
    pipeline: int = Field(1, ge=1, description="ranks that hold layers one after the other, by the job's stages()")
    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field("1f1b", description="of a pipeline")
    microbatches: int = Field(1, ge=1, description="of a pipeline: pieces of a micro-batch that are on their way")
    stages_per_rank: int = Field(1, ge=1, description="of a pipeline; interleaved: 2 or more")
    activation_checkpointing: bool = Field(
        False, description="the job's blocks() are computed again in the backward pass instead of being kept"
    )
    compression: Literal["fp16", "powersgd"] | None = Field(None, description="ddp: gradients, on the wire only")
    powersgd_rank: int = Field(1, ge=1, description="of the approximation")
    powersgd_start_steps: int = Field(10, ge=2, description="steps without compression at first")
    local_steps: int = Field(
        1, ge=1, description="ddp: steps that a rank takes for itself between synchronisations; 1: none"
    )
    local_after_steps: int = Field(0, ge=0, description="steps whose gradients are summed, before local ones begin")
    outer: Literal["average", "nesterov"] = Field(
        "average", description="local steps end in the mean of the weights, or in a step towards it with momentum"
    )
    outer_lr: float = Field(OUTER_LR, gt=0, description="nesterov: learning rate of that step")
    outer_momentum: float = Field(OUTER_MOMENTUM, gt=0, lt=1, description="nesterov: its momentum")
    collective_timeout_seconds: float = Field(
        60.0, gt=0, description="a collective that takes longer ends the group; a hung rank is found much sooner"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Each rule names what to change."""
        if self.world % (self.pipeline * self.tensor):
            raise ValueError(
                f"world {self.world} is no multiple of tensor {self.tensor}"
                if self.pipeline == 1
                else f"world {self.world} is no multiple of pipeline {self.pipeline} times tensor {self.tensor}"
            )
        if self.data == "hsdp":
            if self.replicas < 2 or self.data_ranks % self.replicas or self.data_ranks == self.replicas:
                raise ValueError(
                    f"hsdp needs replicas >= 2 that divide the {self.data_ranks} data ranks into shards of 2 or "
                    f"more, not {self.replicas}; else use fsdp or ddp"
                )
        elif self.replicas != 1:
            raise ValueError(f"replicas belong to hsdp, not to {self.data}")
        if self.compression is not None and (self.data != "ddp" or self.tensor > 1):
            raise ValueError(f"compression {self.compression} is a hook of ddp without tensor parallelism")
        if self.data == "ddp" and self.tensor > 1 and self.data_ranks > 1:
            raise ValueError("tensor parallelism with several data-parallel ranks needs data: fsdp")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence belongs to tensor >= 2: the ranks that share layers share the sequence")
        self._fits_its_nodes()
        return self

    @model_validator(mode="after")
    def _pipeline_fits(self) -> Self:
        if self.pipeline == 1:
            for name in ("schedule", "microbatches", "stages_per_rank"):
                if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} belongs to a pipeline; set pipeline to 2 or more")
            return self
        if self.data == "hsdp" or self.compression is not None:
            other = "data: hsdp" if self.data == "hsdp" else f"compression: {self.compression}"
            raise ValueError(f"a pipeline and {other} cannot be combined; take ddp without compression, or fsdp")
        if self.sequence:
            raise ValueError("a pipeline sends whole sequences from stage to stage: set sequence to false")
        if (self.schedule == "interleaved") != (self.stages_per_rank > 1):
            raise ValueError(
                f"stages_per_rank {self.stages_per_rank} with schedule {self.schedule}: interleaved needs 2 or "
                "more, gpipe and 1f1b need 1"
            )
        if self.schedule == "1f1b" and self.microbatches < self.pipeline:
            raise ValueError(
                f"microbatches {self.microbatches} leave ranks of a pipeline of {self.pipeline} idle; 1f1b needs "
                f"at least {self.pipeline}, or take schedule: gpipe"
            )
        rounds = max(1, self.microbatches // self.pipeline)
        if self.schedule == "interleaved" and self.microbatches % rounds:
            raise ValueError(
                f"microbatches {self.microbatches} do not fall into {rounds} equal rounds of interleaved; take a "
                f"multiple of pipeline {self.pipeline}"
            )
        return self

    @model_validator(mode="after")
    def _local_steps_fit(self) -> Self:
        """Each rule names what to change."""
        if self.outer != "nesterov" and (self.outer_lr, self.outer_momentum) != (OUTER_LR, OUTER_MOMENTUM):
            raise ValueError(f"outer_lr and outer_momentum belong to outer: nesterov, not to {self.outer}")
        if self.local_steps == 1:
            if self.local_after_steps or self.outer != "average":
                raise ValueError("local_after_steps and outer belong to local_steps >= 2")
        elif self.data != "ddp" or self.tensor > 1 or self.pipeline > 1:
            raise ValueError(
                f"local_steps {self.local_steps} needs whole replicas: data: ddp, no tensor and no pipeline"
            )
        elif self.compression is not None:
            raise ValueError(f"local_steps {self.local_steps} sums no gradients to compress: drop compression")
        return self

    def _fits_its_nodes(self) -> None:
        if self.world % self.nodes or self.ranks_per_node % self.tensor:
            raise ValueError(
                f"nodes {self.nodes} must share world {self.world} evenly, "
                f"and each hold whole tensor groups of {self.tensor}"
            )
        if self.fewest_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        for fewer in range(self.fewest_nodes, self.nodes):
            try:
                self.on(fewer)
            except ValidationError as error:
                why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
                raise ValueError(f"min_nodes {self.min_nodes}, but with {fewer} nodes: {why}") from error

    @property
    def ranks_per_node(self) -> int:
        """On each machine as many."""
        return self.world // self.nodes

    @property
    def fewest_nodes(self) -> int:
        """With fewer of them there is no group."""
        return self.min_nodes or self.nodes

    def on(self, nodes: int) -> ParallelConfig:
        """The group that so many of the nodes make. Raises `ValidationError`: they make none."""
        if nodes == self.nodes:
            return self
        fewer = {"world": self.ranks_per_node * nodes, "nodes": nodes, "min_nodes": None}
        return ParallelConfig.model_validate({**self.model_dump(), **fewer})

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.world // (self.pipeline * self.tensor)

    @property
    def stages(self) -> int:
        """Into which a pipeline cuts the model."""
        return self.pipeline * self.stages_per_rank
