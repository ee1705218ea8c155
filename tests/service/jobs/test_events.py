"""The journal: numbers without gaps, and one progress between two other events."""

from __future__ import annotations

from service.state.steps import Steps


def test_events_are_numbered_without_gaps_and_the_conversion_knows_the_newest(journal, conversions, queued, leases):
    lease, _ = leases.claim()
    steps = Steps(journal)
    steps.start(lease, {"step": "a", "step_index": 1, "step_count": 2})
    steps.warn(lease, "Something was rounded.")
    events = journal.events_after(queued.id, 0, seen=0)
    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert [event.kind for event in events] == ["state_changed", "state_changed", "step_started", "warning"]
    assert conversions.get("default", queued.id).last_sequence == 4


def test_only_the_newest_progress_between_two_other_events_is_kept(journal, queued, leases):
    lease, _ = leases.claim()
    steps = Steps(journal)
    for done in (1, 2, 3):
        steps.progress(lease, {"done": done})
    steps.warn(lease, "between")
    for done in (4, 5):
        steps.progress(lease, {"done": done})
    told = [(e.sequence, e.kind, e.body.get("done")) for e in journal.events_after(queued.id, 2, seen=0)]
    assert told == [(3, "progress", 3), (4, "warning", None), (5, "progress", 5)]


def test_a_watcher_gets_the_newest_progress_again_only_when_it_moved_on(journal, queued, leases):
    lease, _ = leases.claim()
    Steps(journal).progress(lease, {"done": 1})
    (seen,) = journal.events_after(queued.id, 2, seen=0)
    assert journal.events_after(queued.id, seen.sequence, seen=seen.time) == []
    Steps(journal).progress(lease, {"done": 2})
    (again,) = journal.events_after(queued.id, seen.sequence, seen=seen.time)
    assert (again.sequence, again.body) == (seen.sequence, {"done": 2})
