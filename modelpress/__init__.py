"""modelpress: make a trained model smaller and faster, prove what it cost, ship it signed.

    import modelpress

    with modelpress.Client("127.0.0.1:8471") as client:
        conversion = client.create_conversion(request)
        done = client.wait(conversion.name)

Nothing in this package imports torch: it is what training environments install. The names below are imported when
they are first used, so that `import modelpress` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from modelpress.client import Client
    from modelpress.errors import ModelpressError
    from modelpress.manifests import ArtifactKind
    from modelpress.reports import Verdict
    from modelpress.requests import AdapterInput, ConversionRequest, Documents, Limits, ModelInput
    from modelpress.retries import RetryPolicy
    from modelpress.verification import verify_folder
    from modelpress.views import Conversion, ConversionState, Event

_HOMES = {
    "AdapterInput": "requests",
    "ArtifactKind": "manifests",
    "Client": "client",
    "Conversion": "views",
    "ConversionRequest": "requests",
    "ConversionState": "views",
    "Documents": "requests",
    "Event": "views",
    "Limits": "requests",
    "ModelInput": "requests",
    "ModelpressError": "errors",
    "RetryPolicy": "retries",
    "Verdict": "reports",
    "verify_folder": "verification",
}
"""Public name -> the module that has it."""

__all__ = [
    "AdapterInput",
    "ArtifactKind",
    "Client",
    "Conversion",
    "ConversionRequest",
    "ConversionState",
    "Documents",
    "Event",
    "Limits",
    "ModelInput",
    "ModelpressError",
    "RetryPolicy",
    "Verdict",
    "verify_folder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'modelpress' has no attribute {name!r}")
    return getattr(import_module(f"modelpress.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
