"""Every service of the wire by its full name, as the server registers it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from modelpress.v1 import artifacts_pb2_grpc, capabilities_pb2_grpc, conversions_pb2_grpc, reports_pb2_grpc
from service.dispatcher import Dispatcher
from service.edge.artifacts import ArtifactParts, ArtifactsServicer
from service.edge.capabilities import CapabilitiesServicer, describe
from service.edge.conversions import ConversionParts, ConversionsServicer
from service.edge.reports import ReportsServicer
from service.edge.server import Registration
from service.foundation import Foundation
from service.intake import inspect_artifact
from service.state.artifacts import ArtifactRepository
from service.state.conversions import Conversions
from service.storage.uploads import UploadDesk
from service.workers.probe import WorkerFacts


def registrations(
    foundation: Foundation, uploads: UploadDesk, dispatcher: Dispatcher, conversions: ConversionsServicer
) -> Mapping[str, Registration]:
    store, threads, journal = foundation.store, foundation.threads, foundation.journal
    repository = ArtifactRepository(journal.engine)
    artifacts = ArtifactsServicer(ArtifactParts(store, repository, uploads, inspect_artifact, threads))
    reports = ReportsServicer(Conversions(journal), store, threads)
    able = describe(foundation.config, foundation.signer)
    capabilities = CapabilitiesServicer(able, partial(_worker_facts, dispatcher), threads)
    return {
        "modelpress.v1.Artifacts": partial(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, artifacts),
        "modelpress.v1.Conversions": partial(conversions_pb2_grpc.add_ConversionsServicer_to_server, conversions),
        "modelpress.v1.Reports": partial(reports_pb2_grpc.add_ReportsServicer_to_server, reports),
        "modelpress.v1.Capabilities": partial(capabilities_pb2_grpc.add_CapabilitiesServicer_to_server, capabilities),
    }


def conversions_servicer(foundation: Foundation, dispatcher: Dispatcher) -> ConversionsServicer:
    """Made apart from the others, because its watchers are told when the server drains."""
    repository = ArtifactRepository(foundation.journal.engine)
    able = describe(foundation.config, foundation.signer)
    parts = ConversionParts(
        foundation.journal,
        dispatcher,
        repository,
        foundation.store,
        able,
        foundation.threads,
        free_bytes=partial(_free_bytes, foundation.config.storage.data),
    )
    return ConversionsServicer(parts)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _worker_facts(dispatcher: Dispatcher) -> WorkerFacts | None:
    """Waits for the workers' first start; None where this server has none."""
    tools = dispatcher.tools()
    return tools.facts if tools else None
