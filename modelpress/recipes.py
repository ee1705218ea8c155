"""The recipe: an ordered list of stages, written by people as YAML.

    stages:
      - method: merge_lora
      - method: prune
        targets: [ffn]
        ratio: 0.45
      - method: recover
        steps: 200
      - method: quantize
        scheme: int8_qat
        steps: 100
      - method: export
        format: onnx

The same types validate it on the client and on the server. A stage's defaults are part of what is signed:
`Recipe.canonical()` holds every field.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from modelpress.canonical import canonical_json
from modelpress.documents import Document, read_document
from modelpress.errors import InvalidRecipe
from modelpress.merge_recipes import MergeLora, MergeModels, each_once
from modelpress.quantization_recipes import CODEBOOKS, QuantizeWeights


class Prune(Document):
    """Remove whole structures and rewrite the config, so that plain `from_pretrained` loads the result."""

    method: Literal["prune"] = "prune"
    targets: tuple[Literal["ffn"], ...] = Field(default=("ffn",), min_length=1)
    """What to remove: FFN neurons. Attention heads stay: BERT's config derives their size from hidden width and head
    count, so fewer heads would mean less width in every tensor on the residual stream."""
    ratio: float = Field(default=0.4, gt=0, lt=1)
    """Share of each target's structures to remove, in (0, 1)."""
    importance: Literal["magnitude", "taylor"] = "taylor"
    """How a structure's weight in the output is judged; `taylor` reads training data."""
    round_to: int = Field(default=8, ge=1, le=256)
    """What remains is a multiple of this many structures: odd widths run slower."""
    calibration_examples: int = Field(default=512, ge=1, le=100_000)
    """Training examples that Taylor importance reads."""

    @field_validator("targets")
    @classmethod
    def _targets_each_once(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        return each_once(targets)


class TrainingArguments(Document):
    """What every training stage shares."""

    steps: int = Field(default=200, ge=0, le=1_000_000)
    """Optimizer steps."""
    batch_size: int = Field(default=32, ge=1, le=4096)
    """Examples of one forward pass."""
    gradient_accumulation: int = Field(default=1, ge=1, le=1024)
    """Forward passes per optimizer step."""
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    warmup_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps with a rising learning rate; afterwards it falls on a cosine to 0."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    temperature: float = Field(default=2.0, gt=0, le=100)
    """Softens both distributions of the KL distillation loss."""
    kl_weight: float = Field(default=1.0, ge=0)
    hidden_state_weight: float = Field(default=1.0, ge=0)
    """Weight of the mean squared error between hidden states of teacher and student."""
    label_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy with the data's own labels."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Steps between checkpoints, and between looks at the held-out split."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens; longer training texts are cut, and counted in the record."""
    mixed_precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 autocast on CUDA, float32 on CPU."""
    activation_checkpointing: bool = False

    @model_validator(mode="after")
    def _has_a_loss(self) -> TrainingArguments:
        if not self.kl_weight + self.hidden_state_weight + self.label_weight:
            raise ValueError("kl_weight, hidden_state_weight and label_weight are all 0: there is nothing to train on")
        return self


class Recover(TrainingArguments):
    """Train the pruned model against the unpruned one (distillation)."""

    method: Literal["recover"] = "recover"
    steps: int = Field(default=100, ge=0, le=1_000_000)
    batch_size: int = Field(default=64, ge=1, le=4096)
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    hidden_state_weight: float = Field(default=300.0, ge=0)


class Quantize(TrainingArguments):
    """INT8 weights and activations through torchao PT2E; `int8_qat` starts from the calibrated post-training state."""

    method: Literal["quantize"] = "quantize"
    scheme: Literal["int8_qat", "int8_ptq"] = "int8_qat"
    steps: int = Field(default=100, ge=0, le=1_000_000)
    learning_rate: float = Field(default=2e-5, gt=0, le=1)
    hidden_state_weight: float = Field(default=0.0, ge=0)
    """Not used here: the quantized graph gives logits only."""
    calibration_examples: int = Field(default=256, ge=1, le=100_000)
    """Training examples that set the activation ranges."""
    embeddings: Literal["int8", "float32"] = "int8"
    """Embedding tables: INT8 per row, or left float."""
    ignore: tuple[str, ...] = ()
    """Module names (exact, or `re:` and a regular expression) that stay float. One that matches nothing is refused."""

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, ignore: tuple[str, ...]) -> tuple[str, ...]:
        for name in ignore:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as fault:
                raise ValueError(f"{name[:80]!r} is no regular expression: {fault}") from None
        return ignore


class Export(Document):
    """Write the model in its target format."""

    method: Literal["export"] = "export"
    format: Literal["onnx", "safetensors", "compressed-tensors", "gptq", "bitsandbytes"] = "onnx"
    """`safetensors`: the merged model's own files, for recipes that only merge; nothing is measured in a runtime.
    `compressed-tensors`, `gptq` and `bitsandbytes`: what `quantize_weights` made, as safetensors in that layout."""
    opset: int = Field(default=20, ge=18, le=21)
    """ONNX operator set; from 20 on GELU is one operator, which ONNX Runtime runs faster."""


Stage = Annotated[
    MergeLora | MergeModels | Prune | Recover | Quantize | QuantizeWeights | Export, Field(discriminator="method")
]

MERGES = ("merge_lora", "merge_models")
NEEDS_TRAINING_DATA = ("recover", "quantize")
ENCODER_STAGES = ("prune", "recover", "quantize")
"""Stages for classifiers; `quantize_weights` is for decoder language models."""
WEIGHT_FORMATS: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors": ("w4a16", "w8a16", "w8a8"),
    "gptq": ("w4a16", "w8a16"),
    "onnx": ("w4a16", "w8a16"),
    "bitsandbytes": CODEBOOKS,
}
"""Export format -> schemes of `quantize_weights` that it can hold."""


class Recipe(Document):
    """An ordered list of stages; the last one, and only the last one, is `export`."""

    stages: tuple[Stage, ...] = Field(min_length=1, max_length=32)

    @model_validator(mode="after")
    def _is_possible(self) -> Recipe:
        methods: list[str] = [stage.method for stage in self.stages]
        if methods[-1] != "export" or methods.count("export") != 1:
            raise ValueError("the last stage must be 'export', and only the last: end the list with `- method: export`")
        for method in (*MERGES, "quantize", "quantize_weights"):
            if methods.count(method) > 1:
                raise ValueError(f"{method!r} stands {methods.count(method)} times: at most once is possible")
        merges = [method for method in methods if method in MERGES]
        if len(merges) > 1:
            raise ValueError(
                "'merge_lora' and 'merge_models' exclude each other: merge one kind, then the other's result"
            )
        if merges and methods[0] not in MERGES:
            raise ValueError(
                f"{merges[0]!r} must be the first stage: what it merges fits only the model that it was trained on"
            )
        if self.is_merge_only and len(methods) != len(merges) + 1:
            raise ValueError(
                "export's format 'safetensors' is for recipes that only merge: what other stages cost is measured in "
                "the target format's runtime, so export 'onnx'"
            )
        if self.is_merge_only and not merges:
            raise ValueError("nothing is changed: put `- method: merge_lora` before the export")
        self._check_quantized_weights(methods)
        if "quantize" in methods and methods.index("quantize") != len(methods) - 2:
            raise ValueError("'quantize' must stand right before 'export': what is quantized is what ships")
        if "recover" in methods and "prune" not in methods[: methods.index("recover")]:
            raise ValueError("'recover' needs a 'prune' stage before it: there is nothing to recover from")
        return self

    def _check_quantized_weights(self, methods: list[str]) -> None:
        """`quantize_weights` is for decoders, stands right before the export, and fits the export's format."""
        quantizer, export = self.quantize_weights, self.export
        if quantizer is None:
            if export.format in ("compressed-tensors", "gptq", "bitsandbytes"):
                raise ValueError(
                    f"export's format {export.format!r} holds quantized weights: put `- method: quantize_weights` "
                    "before the export"
                )
            return
        other = next((method for method in methods if method in ENCODER_STAGES), None)
        if other is not None:
            raise ValueError(f"{other!r} is for classifiers and 'quantize_weights' for decoders: leave one of them out")
        if methods.index("quantize_weights") != len(methods) - 2:
            raise ValueError("'quantize_weights' must stand right before 'export': what is quantized is what ships")
        if quantizer.scheme not in WEIGHT_FORMATS[export.format]:
            fitting = ", ".join(name for name, schemes in WEIGHT_FORMATS.items() if quantizer.scheme in schemes)
            raise ValueError(
                f"export's format {export.format!r} cannot hold {quantizer.scheme!r}: export as {fitting}, or choose "
                f"a scheme of {', '.join(WEIGHT_FORMATS[export.format])}"
            )
        if export.format == "gptq" and quantizer.scale_dtype != "float16":
            raise ValueError("'gptq' files hold scales in float16: set scale_dtype: float16 in 'quantize_weights'")

    @property
    def export(self) -> Export:
        """The last stage."""
        return next(stage for stage in self.stages if isinstance(stage, Export))

    @property
    def quantize_weights(self) -> QuantizeWeights | None:
        """The stage that quantizes a decoder's weights, if there is one."""
        return next((stage for stage in self.stages if isinstance(stage, QuantizeWeights)), None)

    @property
    def merge(self) -> MergeLora | MergeModels | None:
        """The stage that merges, if there is one."""
        return next((stage for stage in self.stages if isinstance(stage, MergeLora | MergeModels)), None)

    @property
    def is_merge_only(self) -> bool:
        """Whether the merged safetensors themselves ship: no dataset is read, no runtime measured."""
        return any(isinstance(stage, Export) and stage.format == "safetensors" for stage in self.stages)

    @property
    def needs_training_data(self) -> tuple[str, ...]:
        """Methods of this recipe that read the training dataset."""
        return tuple(
            stage.method
            for stage in self.stages
            if stage.method in NEEDS_TRAINING_DATA
            or (isinstance(stage, Prune) and stage.importance == "taylor")
            or (isinstance(stage, QuantizeWeights) and stage.needs_calibration)
        )

    def canonical(self) -> bytes:
        """Canonical JSON with every default written out."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.canonical()).hexdigest()


def read_recipe(text: str) -> Recipe:
    """Parse a recipe; a fault is one InvalidRecipe naming the field and what is allowed."""
    return read_document(Recipe, text, InvalidRecipe)


def read_stage(value: Mapping[str, Any]) -> Stage:
    """One stage from its JSON value; what `stage.model_dump(mode="json")` gave comes back equal."""
    return TypeAdapter(Stage).validate_python(value)
