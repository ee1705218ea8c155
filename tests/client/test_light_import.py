"""What `import modelpress` and the command line load, and that every public name is there."""

import subprocess
import sys

import pytest

import modelpress

HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "numpy", "sqlalchemy", "service", "compressors", "evaluators")


def loaded_by(code):
    printed = f"{code}\nimport sys; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", printed], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_of_weight():
    assert loaded_by("import modelpress").isdisjoint({*HEAVY, "grpc", "pydantic", "typer", "rich", "google.protobuf"})


@pytest.mark.parametrize(
    "code", ["import modelpress.client", "import modelpress.cli.app", "import modelpress.__init__"]
)
def test_the_client_and_the_command_line_never_load_a_framework(code):
    assert loaded_by(code).isdisjoint(HEAVY)


def test_help_needs_no_grpc():
    assert "grpc" not in loaded_by("import modelpress.cli.app")


def test_every_public_name_is_there():
    assert {name for name in modelpress.__all__ if getattr(modelpress, name).__name__ != name} == set()
    assert set(modelpress.__all__) <= set(dir(modelpress))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        modelpress.nonsense  # noqa: B018
