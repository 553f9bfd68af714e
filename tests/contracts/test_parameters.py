"""Parameter stores: whole versions that grow, the exact one where asked, and an end."""

from __future__ import annotations

from repertory.runtimes.base import Runtime
from tests.contracts import roles


def test_the_newest_version_is_whole_and_never_goes_back(runtime: Runtime) -> None:
    # 3 MB a version, published as fast as it goes: a reader that mixes two fails in `number_in`.
    size = 250_000
    store = runtime.parameter_store(roles.model_of(0, size), num_readers=2)
    queue = runtime.trajectory_queue(roles.SPEC, 2, order="actor")
    runtime.start("learner-0", roles.publish, 300, store.writer(), queue.reader(), 2, size)
    for actor in range(2):
        runtime.start(
            f"actor-{actor}", roles.follow, store.reader(actor), queue.writer(actor), size
        )
    results = runtime.supervise(lambda role, record: None)
    for actor in range(2):
        seen = results[f"actor-{actor}"]
        assert seen == sorted(seen)
        assert len(set(seen)) > 1


def test_exactly_the_version_asked_for(runtime: Runtime) -> None:
    store = runtime.parameter_store(roles.model_of(0), num_readers=1)
    queue = runtime.trajectory_queue(roles.SPEC, 1, order="actor")
    runtime.start("learner-0", roles.take_turns_publishing, 20, store.writer(), queue.reader())
    runtime.start("actor-0", roles.answer_each_version, queue.writer(0), store.reader(0))
    results = runtime.supervise(lambda role, record: None)
    assert results["actor-0"] == list(range(20))
