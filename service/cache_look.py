"""Which steps of a request are in the cache already: the main path walked with a runner that computes nothing."""

from __future__ import annotations

from contextlib import suppress

from service import pipeline
from service.plan import make_plan
from service.requests import ConversionRequest
from service.state.steps import Steps
from service.steps import Step, StepResult
from service.storage.checkpoints import is_whole
from service.storage.store import ContentStore
from service.workers.probe import WorkerFacts


class _NotCached(LookupError):
    """The walk ends here: what follows depends on a result that nobody has."""


class CacheLook:
    """A `pipeline.Runner` that answers from one tenant's cache and remembers what it found.

    `memory_limit_bytes`: what a worker gets for the request that is looked up.
    """

    def __init__(
        self, tenant: str, *, steps: Steps, store: ContentStore, facts: WorkerFacts, memory_limit_bytes: int
    ) -> None:
        self.found: list[str] = []
        self.memory_limit_bytes = memory_limit_bytes
        self._tenant = tenant
        self._steps = steps
        self._store = store
        self._facts = facts

    def run(self, step: Step) -> StepResult:
        result = self._steps.cached(self._tenant, step.key(self._facts.key_environment(step)))
        if result is None or (result.digest and not is_whole(self._store, result.digest)):
            raise _NotCached(step.name)
        if step.name not in self.found:
            self.found.append(step.name)
        return result

    def run_paired(self, step: Step) -> StepResult:
        return self.run(step)

    def walk(self, request: ConversionRequest) -> tuple[str, ...]:
        """Names of the steps that a conversion would take from the cache, up to the first that it would not."""
        with suppress(_NotCached):
            pipeline.make_candidate(make_plan(request), self)
        return tuple(self.found)
