"""Generate the Python code of the wire contract: `generate.py PROTOS OUTPUT_FOLDER`.

Proto folder, proto package and Python path agree (`modelpress/v1`), so the output needs no patching.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PACKAGE = Path("modelpress/v1")


def generate(protos: Path, output: Path) -> None:
    sources = sorted(str(file) for file in (protos / PACKAGE).glob("*.proto"))
    plugins = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as made:
        outputs = [f"--{kind}_out={made}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        plugin = [f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
        includes = [f"-I{protos}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, *outputs, *plugin, *sources]) != 0:
            raise SystemExit("protoc failed")
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("*_pb2*"):
            old.unlink()
        for file in (Path(made) / PACKAGE).iterdir():
            shutil.copyfile(file, output / file.name)


if __name__ == "__main__":
    generate(Path(sys.argv[1]), Path(sys.argv[2]))
