"""The Capabilities servicer: what this server can do, found out once at its start."""

# ruff: noqa: N802 - the methods' names are the wire's

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from google.protobuf.duration_pb2 import Duration

from modelpress import __version__
from modelpress.evaluations import Evaluation
from modelpress.recipes import Export, Stage
from modelpress.v1 import capabilities_pb2 as pb
from modelpress.v1 import capabilities_pb2_grpc as rpc
from service.config import Config
from service.edge.context import Context
from service.upload_writer import MAX_CHUNK_BYTES

_STAGES = get_args(get_args(Stage)[0])


@dataclass(frozen=True)
class Equipment:
    """What only a look at the machine and the key tells. `runtimes` with version, e.g. `onnxruntime 1.32.0`."""

    families: Sequence[str]
    runtimes: Sequence[str]
    devices: Sequence[str]
    public_key_pem: str
    development_key: bool


class CapabilitiesServicer(rpc.CapabilitiesServicer):
    def __init__(self, config: Config, equipment: Equipment) -> None:
        self._response = describe(config, equipment)

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        return self._response


def describe(config: Config, equipment: Equipment) -> pb.GetCapabilitiesResponse:
    timeout = Duration()
    timeout.FromMilliseconds(int(config.limits.run_timeout_s * 1000))
    return pb.GetCapabilitiesResponse(
        version=__version__,
        methods=[stage.model_fields["method"].default for stage in _STAGES],
        families=equipment.families,
        formats=get_args(Export.model_fields["format"].annotation),
        tasks=get_args(Evaluation.model_fields["task"].annotation),
        runtimes=equipment.runtimes,
        devices=equipment.devices,
        max_chunk_bytes=MAX_CHUNK_BYTES,
        max_blob_bytes=config.limits.max_blob_bytes,
        worker_slots=config.workers.slots,
        worker_threads=config.worker_threads,
        default_run_timeout=timeout,
        default_memory_limit_bytes=config.worker_memory_bytes,
        public_key_pem=equipment.public_key_pem,
        development_key=equipment.development_key,
    )
