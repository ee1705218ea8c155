"""The stage that quantizes the weights of a decoder language model, as a type of the recipe.

    method: quantize_weights
    algorithm: gptq
    scheme: w4a16
    group_size: 64

Scheme names follow compressed-tensors: weight bits and activation bits. The codes that the stage chooses lie on exactly
the grid of the format that ships; nothing rounds them again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from modelpress.documents import Document
from modelpress.merge_recipes import each_once

Algorithm = Literal["rtn", "gptq", "awq", "signround", "qat"]
Scheme = Literal["w4a16", "w8a16", "w8a8", "nf4", "fp4"]

MAX_PATTERNS = 256
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
"""A module's name, or `re:` and a regular expression over names."""

NEEDS_CALIBRATION: tuple[Algorithm, ...] = ("gptq", "awq", "signround", "qat")
"""Algorithms that read the training dataset; so does `smooth_quant`."""
NEEDS_WANTED: tuple[Algorithm, ...] = ("signround",)
"""Algorithms that aim at the unquantized model's outputs: the stage runs that model over the windows too."""
CODEBOOKS: tuple[Scheme, ...] = ("nf4", "fp4")
"""Schemes whose levels are a table, not a step times an integer."""
SCHEME_BITS: Mapping[str, int] = {"w4a16": 4, "w8a16": 8, "w8a8": 8, "nf4": 4, "fp4": 4}


class WeightTraining(Document):
    """How `signround` and `qat` train: roundings and scales of one layer, or the whole model end to end."""

    steps: int = Field(default=60, ge=1, le=1_000_000)
    """Of each decoder layer for `signround`, of the whole model for `qat`, which gains from more."""
    batch_size: int = Field(default=2, ge=1, le=1024)
    """Calibration windows of one step."""
    learning_rate: float | None = Field(default=None, gt=0, le=1)
    """None: 1 / steps for `signround`, 2e-4 for `qat`."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Steps between the checkpoints of `qat`; `signround` has one after each layer."""


class QuantizeWeights(Document):
    """Quantize the linear layers of every decoder layer, one decoder layer in memory at a time; `qat` holds them all.

    rtn        round to nearest
    gptq       Frantar et al. 2022, "GPTQ"
    awq        Lin et al. 2023, "AWQ": channels that matter are scaled up first
    signround  Cheng et al. 2023: roundings and ranges learned by signed gradients, layer by layer
    qat        the whole model trained on the grid, distilled from the unquantized one; activations are not rounded
               while it is trained, also with `w8a8`

    Head, embeddings and norms stay as they are.
    """

    method: Literal["quantize_weights"] = "quantize_weights"
    algorithm: Algorithm = "gptq"
    scheme: Scheme = "w4a16"
    symmetric: bool = True
    group_size: Literal[32, 64, 128] | None = 64
    """Input channels that share a scale; None: one scale per output channel (the default of 8-bit schemes)."""
    scale_dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """dtype of the scales; `stored`: that of the weights, which must be one. `gptq` files hold float16; `nf4` and `fp4`
    always have float32.
    """
    targets: tuple[Pattern, ...] = Field(default=("Linear",), min_length=1, max_length=MAX_PATTERNS)
    """`Linear`: every linear layer of the decoder layers; else module names, or `re:` and a regular expression."""
    ignore: tuple[Pattern, ...] = Field(default=("lm_head",), max_length=MAX_PATTERNS)
    """Modules that stay as they are, named as in `targets`. One that matches nothing is refused, except `lm_head`."""
    calibration_samples: int = Field(default=64, ge=1, le=100_000)
    """Windows of the training texts that are read."""
    sequence_length: int = Field(default=512, ge=16, le=8192)
    """Tokens of one window."""
    clip_search: bool = True
    """With `rtn`, `gptq`, `awq` and `qat` on integer schemes: scale each group's range by the factor from 0.5 to 1.075
    with the lowest squared error of its weights, weighed by their inputs with `gptq` and `awq`. `signround` learns the
    ranges; those of `nf4` and `fp4` are given.
    """
    refine_scales: bool = True
    """With `gptq`: solve for each group's scale again once the codes are chosen."""
    damping: float = Field(default=0.01, gt=0, le=1)
    """With `gptq`: what is added to the Hessian's diagonal, as a share of its mean."""
    smooth_quant: float | None = Field(default=None, ge=0, le=1)
    """With `w8a8`: migration strength of SmoothQuant (Xiao et al. 2022), 0.5 in the paper; None: not done."""
    max_fallback_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the targets that may be quantized by rounding alone, or stay float, because they cannot be otherwise."""
    training: WeightTraining = WeightTraining()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_scheme(cls, value: object) -> object:
        if isinstance(value, dict) and "group_size" not in value:
            per_channel = value.get("scheme") in ("w8a16", "w8a8")
            return {**value, "group_size": None if per_channel else 64}
        return value

    @field_validator("targets", "ignore")
    @classmethod
    def _patterns_compile(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as fault:
                raise ValueError(f"{name[:80]!r} is no regular expression: {fault}") from None
        return each_once(names)

    @model_validator(mode="after")
    def _is_possible(self) -> QuantizeWeights:
        if self.scheme in CODEBOOKS:
            self._check_codebook()
        if self.scheme == "w4a16" and self.group_size is None:
            raise ValueError("group_size is needed by 'w4a16': 32, 64 or 128")
        if self.scheme == "w8a8" and (self.group_size is not None or not self.symmetric):
            raise ValueError("'w8a8' has one symmetric scale per output channel: leave out group_size and symmetric")
        if self.smooth_quant is not None and self.scheme != "w8a8":
            raise ValueError("smooth_quant moves outliers out of 8-bit activations: leave it out without 'w8a8'")
        if self.smooth_quant is not None and self.algorithm == "qat":
            raise ValueError("smooth_quant: 'qat' trains the weights as they are: leave it out, or take 'gptq'")
        return self

    def _check_codebook(self) -> None:
        if self.algorithm not in ("rtn", "qat"):
            raise ValueError(f"{self.scheme!r} is quantized by 'rtn' or 'qat', not by {self.algorithm!r}")
        if self.scale_dtype != "stored":
            raise ValueError(f"{self.scheme!r} holds its ranges in float32: leave out scale_dtype")
        if not self.symmetric:
            raise ValueError(f"{self.scheme!r} has no zero point: leave out symmetric")
        if self.group_size is None:
            raise ValueError(f"group_size is needed by {self.scheme!r}: 32, 64 or 128")

    @property
    def num_bits(self) -> int:
        return SCHEME_BITS[self.scheme]

    @property
    def needs_calibration(self) -> bool:
        """Whether the stage reads the training dataset."""
        return self.algorithm in NEEDS_CALIBRATION or self.smooth_quant is not None
