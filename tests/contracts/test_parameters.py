"""Parameter stores: whole versions that grow, the exact one where asked, and an end."""

from __future__ import annotations

from repertory.runtimes.base import Runtime
from tests.contracts import roles


def test_the_newest_version_is_whole_and_never_goes_back(runtime: Runtime) -> None:
    # 3 MB a version, published as fast as it goes: a reader that mixes two fails in `number_in`.
    size = 250_000
    store = runtime.parameter_store(roles.model_of(0, size), num_readers=2)
    runtime.start("learner-0", roles.publish, 60, store.writer(), 0.0, size)
    runtime.start("actor-0", roles.follow, store.reader(0), size)
    runtime.start("actor-1", roles.follow, store.reader(1), size)
    results = runtime.supervise(lambda role, record: None)
    for actor in range(2):
        seen = results[f"actor-{actor}"]
        assert seen == sorted(seen)


def test_exactly_the_version_asked_for(runtime: Runtime) -> None:
    store = runtime.parameter_store(roles.model_of(0), num_readers=1)
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    runtime.start("learner-0", roles.take_turns_publishing, 20, store.writer(), queue.reader())
    runtime.start("actor-0", roles.answer_each_version, queue.writer(0), store.reader(0))
    results = runtime.supervise(lambda role, record: None)
    assert results["actor-0"] == list(range(20))


def test_a_reader_waits_for_the_first_version_and_ends_with_the_store(runtime: Runtime) -> None:
    store = runtime.parameter_store(roles.model_of(0), num_readers=1)
    runtime.start("actor-0", roles.follow, store.reader(0))
    runtime.start("learner-0", roles.publish, 2, store.writer(), 0.3)
    results = runtime.supervise(lambda role, record: None)
    assert set(results["actor-0"]) <= {0, 1}
    assert results["actor-0"]
