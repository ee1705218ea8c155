"""Training checkpoints: safetensors for tensors, JSON for the rest. Nothing in them can run.

weights/NAME  best/NAME          trained parameters and buffers: now, and at the best look so far
exp_avg/NAME  exp_avg_sq/NAME  adam_step/NAME      AdamW's moments
rng/cpu  rng/cuda                torch's random states
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpress.errors import FailedPrecondition

TENSORS = "training.safetensors"
FACTS = "training.json"
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "adam_step": "step"}


@dataclass(frozen=True)
class Checkpoint:
    """`facts` are JSON values; a checkpoint that was written and read again is equal, bit for bit."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors of one group, under their own names."""
        return {key.removeprefix(f"{name}/"): t for key, t in self.tensors.items() if key.startswith(f"{name}/")}


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, folder / TENSORS)
    (folder / FACTS).write_text(json.dumps(dict(checkpoint.facts), sort_keys=True), encoding="utf-8")


def read_checkpoint(folder: Path, *, identity: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint of the very same training; FailedPrecondition names the first fact that differs."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    for name, value in identity.items():
        found = facts["identity"].get(name)
        if found != value:
            raise FailedPrecondition(
                f"the checkpoint was written with {name} {found!r}, this training has {value!r}: "
                "resume with the same one, or retry without the checkpoint",
                reason="CHECKPOINT_MISMATCH",
                field=name,
            )
    return Checkpoint(load_file(folder / TENSORS), facts)


def grouped(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of several groups under one flat mapping."""
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of what training may change: parameters that require gradients, and buffers."""
    frozen = {
        name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    }
    aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - dict(
        module.named_parameters()
    ).keys()
    return {k: v.detach().clone() for k, v in module.state_dict().items() if k not in frozen and k not in aliases}


def load_trained_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The reverse of `trained_state`: afterwards both are equal."""
    unknown = state.keys() - module.state_dict().keys()
    if unknown or state.keys() != trained_state(module).keys():
        raise FailedPrecondition("the checkpoint belongs to another model", reason="CHECKPOINT_MISMATCH")
    module.load_state_dict(dict(state), strict=False)


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state by parameter name."""
    found = {}
    for name, parameter in parameters.items():
        for group, key in MOMENTS.items():
            if key in optimizer.state.get(parameter, {}):
                found[f"{group}/{name}"] = optimizer.state[parameter][key]
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """The reverse of `optimizer_tensors`."""
    for group, key in MOMENTS.items():
        for name, tensor in checkpoint.group(group).items():
            optimizer.state[parameters[name]][key] = tensor.to(parameters[name].device)


def random_states(device: str) -> dict[str, Tensor]:
    """torch's random states, as uint8 tensors."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.startswith("cuda") else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def load_random_states(states: Mapping[str, Tensor], *, device: str) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
