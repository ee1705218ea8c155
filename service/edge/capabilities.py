"""The Capabilities servicer: what this server can do."""

# ruff: noqa: N802 - the methods' names are the wire's

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from google.protobuf.duration_pb2 import Duration

from compressors.decoder_families import DECODERS
from compressors.families import FAMILIES
from modelpress import __version__
from modelpress.evaluations import AnyEvaluation
from modelpress.recipes import Export, Stage
from modelpress.v1 import capabilities_pb2 as pb
from modelpress.v1 import capabilities_pb2_grpc as rpc
from service.config import Config
from service.edge.context import Context
from service.signing import Signer
from service.storage.upload_writer import MAX_CHUNK_BYTES
from service.threads import Threads
from service.workers.probe import WorkerFacts

RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
"""Distributions that run what is exported."""

_STAGES = get_args(get_args(Stage)[0])


class CapabilitiesServicer(rpc.CapabilitiesServicer):
    """`facts` waits for the workers' first start, which finds out about devices and runtimes; None: no workers."""

    def __init__(
        self, able: pb.GetCapabilitiesResponse, facts: Callable[[], WorkerFacts | None], threads: Threads
    ) -> None:
        self._able = able
        self._facts = facts
        self._threads = threads

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        facts = await self._threads.run(self._facts)
        able = pb.GetCapabilitiesResponse()
        able.CopyFrom(self._able)
        if facts:
            versions = facts.environment.versions
            able.devices.append(facts.environment.device)
            able.runtimes.extend(f"{name} {versions[name]}" for name in RUNTIMES if name in versions)
        return able


def describe(config: Config, signer: Signer) -> pb.GetCapabilitiesResponse:
    """All that is known without a worker."""
    timeout = Duration()
    timeout.FromMilliseconds(int(config.limits.run_timeout_s * 1000))
    return pb.GetCapabilitiesResponse(
        version=__version__,
        methods=[stage.model_fields["method"].default for stage in _STAGES],
        families=[*FAMILIES, *DECODERS],
        formats=get_args(Export.model_fields["format"].annotation),
        tasks=[kind.model_fields["task"].default for kind in get_args(AnyEvaluation)],
        max_chunk_bytes=MAX_CHUNK_BYTES,
        max_blob_bytes=config.limits.max_blob_bytes,
        worker_slots=config.workers.slots,
        worker_threads=config.worker_threads,
        default_run_timeout=timeout,
        default_memory_limit_bytes=config.worker_memory_bytes,
        public_key_pem=signer.public_key_pem,
        development_key=signer.development,
    )
