"""What a quantizing stage did to each linear layer, as types."""

from __future__ import annotations

from modelpress.documents import Document


class QuantizedLayer(Document):
    """One linear layer of the model. Errors are |Y - Y'| / |Y| (Frobenius) of its output on the calibration inputs."""

    name: str
    """The module's name, e.g. `model.layers.0.mlp.up_proj`."""
    algorithm: str
    """What chose the codes; `none` where the layer stayed float."""
    num_bits: int
    """16 or 32 where the layer stayed float."""
    group_size: int | None
    error: float | None
    """None where nothing was calibrated."""
    rounding_error: float | None = None
    """The error that round to nearest has on the same grid."""
    fallback: str = ""
    """Why the layer was not quantized as the recipe says; empty where it was."""
    seconds: float = 0.0
