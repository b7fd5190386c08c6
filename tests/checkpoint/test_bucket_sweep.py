"""Deleting old checkpoints in buckets: what goes, what never does, stopped at each request, and
raced in each order.
"""

import pytest
from buckets import new_bucket
from contract_sweep import KEEP, SweepContract, below, files_of, run_of_four, stateful, steps
from faults import Requests, try_worlds
from faulty_stores import Watch, all_interleavings

from ft_ckpt import Keep
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.commit import open_object_staging
from ft_ckpt.checkpoint.commit.bucket_delete import drop_from_bucket, strip_in_bucket
from ft_ckpt.checkpoint.leases import (
    LEASE,
    SAVING,
    TOMBSTONE,
    hold_lease,
    leases,
    marks,
    pin,
    pin_reason,
    put_mark,
    read_mark,
    unpin,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import NotACheckpointError, TargetError, UnreadableError
from ft_ckpt.extensions.buckets.object_store import ObjectStore
from ft_ckpt.runs.folder import PruneReport, prune_run, recover_all
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

TEN_MINUTES, DAY = 601, 24 * 3600 + 1  # and a second


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The objects of four checkpoints with a state, and of others who have something in the folder
    of the run.
    """
    root = tmp_path_factory.mktemp("template")
    run_of_four(root)
    local = LocalStore(root)
    return {each.name: local.read(each.name) for each in local.list()}


def filled(store, content):
    for name, data in content.items():
        store.write(name, data)
    return store


@pytest.fixture(params=["memory", "obstore on a disk", "S3"])
def run(request, template, tmp_path):
    """The run in a bucket."""
    pytest.importorskip("obstore")
    if request.param == "memory":
        return filled(new_bucket(), template)
    if request.param == "S3":
        request.getfixturevalue("s3")
        return filled(open_place("s3://bucket/runs/sft").folder, template)
    from obstore.store import LocalStore as ObstoreOnDisk

    return filled(
        ObjectStore(ObstoreOnDisk(tmp_path), "file:///bucket").within("runs/sft"), template
    )


@pytest.fixture
def bucket(template):
    """The same, in memory alone."""
    return filled(new_bucket(), template)


def objects(store):
    """Names and bytes of all but marks."""
    return files_of(Place(store))


def marks_in(store):
    return [each.name for each in store.list() if "/.ft_ckpt-" in f"/{each.name}"]


def refuses_writes(call, where):
    if call in ("write", "delete"):
        raise TargetError(f"{where}: refused")


# What goes, what stays


class TestInABucket(SweepContract):
    @pytest.fixture
    def run(self, bucket):
        return Place(bucket)


@pytest.mark.slow
class TestOnS3(SweepContract):
    @pytest.fixture
    def run(self, s3, template):
        return Place(filled(open_place("s3://bucket/runs/sft").folder, template))


def test_a_dry_run_sends_no_request_that_changes(bucket):
    watch = Watch(
        lambda call, where: pytest.fail(where) if call in ("write", "delete", "create") else None
    )
    prune_run(Place(watch.store(bucket)), KEEP, dry_run=True)


def test_an_empty_run_and_one_that_cannot_be_read(bucket):
    assert prune_run(Place(new_bucket()), Keep(last=1)) == PruneReport()

    def refuse(call, where):
        if call in ("list", "list_folder"):
            raise UnreadableError(f"{where}: refused")

    problem = prune_run(Place(Watch(refuse).store(bucket)), Keep(last=1)).problems[0]
    assert "cannot be listed" in problem
    assert steps(Place(bucket)) == [1, 2, 3, 4]


# Stopped anywhere


def later(bucket, seconds=TEN_MINUTES):
    """The run as it is after a while."""
    watch = Watch()
    watch.age(bucket, seconds)
    return Place(watch.store(bucket))


@pytest.fixture(scope="module")
def after(template):
    bucket = filled(new_bucket(), template)
    prune_run(Place(bucket), KEEP)
    return objects(bucket)


def check_meanwhile(bucket, template):
    """Between two sweeps: what is listed is whole, what stays is as it was, and it is read by who
    comes then.
    """
    assert set(steps(Place(bucket))) >= {3, 4}
    assert [info.path for info in discover(Place(bucket)) if not verify(info.place).ok] == []
    now = objects(bucket)
    assert below(now, "checkpoint-4", "checkpoint-old") == below(
        template, "checkpoint-4", "checkpoint-old"
    )
    assert now["checkpoint-2/notes.txt"] == b"mine"


def without_manifests(content):
    return {name: data for name, data in content.items() if not name.endswith(MANIFEST_NAME)}


@pytest.mark.sample("stopped")
@pytest.mark.parametrize("fault", ["stopped", "refused"])
def test_a_sweep_is_stopped_at_each_request(template, after, fault):
    def trial(world):
        bucket = filled(new_bucket(), template)
        world.run(prune_run, Place(world.watch.store(bucket)), KEEP)
        check_meanwhile(bucket, template)
        assert prune_run(later(bucket), KEEP).problems == ()
        assert without_manifests(objects(bucket)) == without_manifests(after)
        assert (steps(Place(bucket)), stateful(Place(bucket)), marks_in(bucket)) == (
            [3, 4],
            [4],
            [],
        )

    assert try_worlds(trial, Requests(fault), every=3).calls > 40


def test_a_pin_is_stopped_at_each_request(template):
    def trial(world):
        bucket = filled(new_bucket(), below(template, "checkpoint-1"))
        world.run(pin, Place(world.watch.store(bucket.within("checkpoint-1"))), "why")
        assert steps(Place(bucket)) == [1]
        assert (pin_reason(Place(bucket, "checkpoint-1")) or "x: why").endswith(": why")
        unpin(Place(bucket, "checkpoint-1"))
        assert objects(bucket) == below(template, "checkpoint-1")

    assert try_worlds(trial, Requests("stopped"), every=3).calls >= 3


def test_a_reader_is_stopped_at_each_request(template):
    """What it has put holds the checkpoint for ten minutes, and goes with it."""

    def read(place):
        with open_checkpoint(open_place(place)) as held:
            assert held.find_problems(deep=True) == ()

    def trial(world):
        bucket = filled(new_bucket(), template)
        world.run(read, Place(world.watch.store(bucket.within("checkpoint-1"))))
        leased = any(LEASE in name for name in marks_in(bucket))
        report = prune_run(Place(bucket), Keep(last=3))
        assert len(report.dropped) == (0 if leased else 1)
        assert (
            objects(bucket).keys()
            >= below(template, "checkpoint-2", "checkpoint-3", "checkpoint-4").keys()
        )
        prune_run(later(bucket), Keep(last=3))
        assert (steps(Place(bucket)), marks_in(bucket)) == ([2, 3, 4], [])

    assert try_worlds(trial, Requests("stopped"), every=3).calls > 8


# Raced


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(marks, "_POLL_SECONDS", 0.0)


def raced(template, *actors, check):
    """Each order of the requests of `actors`, which get the store of one checkpoint; how many there
    are.

    What reads one object alone is of the version that was listed, or an error, and waits for
    nobody.
    """
    held = {}

    def begin():
        bucket = filled(new_bucket(), below(template, "checkpoint-1"))
        held["bucket"], held["said"] = bucket, {}

        def play(actor):
            def act(hook):
                try:
                    watch = Watch(
                        lambda call, where: (
                            call in ("open", "read", "read_into") or hook(call, where)
                        )
                    )
                    held["said"][actor] = actor(watch.store(bucket.within("checkpoint-1")))
                except (NotACheckpointError, UnreadableError) as error:
                    held["said"][actor] = error

            return act

        return [play(actor) for actor in actors]

    def look():
        for info in discover(Place(held["bucket"])):
            assert verify(info.place).ok
        check(held["bucket"], held["said"])

    return all_interleavings(begin, look)


def reads(store):
    """The weights and the state, as long as it is held."""
    with open_checkpoint(Place(store)) as held:
        store.stat("anything")  # others may come between
        return [held.store.read(file.path) for file in held.manifest.files]


@pytest.mark.sample("drop_from_bucket")
@pytest.mark.parametrize("sweep", [drop_from_bucket, strip_in_bucket])
def test_a_reader_and_a_removal(template, no_pause, sweep):
    """Whoever gets the manifest gets all that it lists; else it says so at once.

    Nobody waits for ever.
    """

    def check(bucket, said):
        removed, read = said[sweep], said[reads]
        if removed.why:
            assert len(below(objects(bucket), "checkpoint-1")) == len(
                below(template, "checkpoint-1")
            )
            assert isinstance(read, list)
        elif sweep is drop_from_bucket:
            assert objects(bucket) == {}
        assert isinstance(read, list) or (
            sweep is drop_from_bucket and isinstance(read, NotACheckpointError)
        )
        assert marks_in(bucket) == []

    assert raced(template, reads, sweep, check=check) > 100


def pins(store):
    return pin(Place(store), "why")


def drops(store):
    return drop_from_bucket(store)


def drops_too(store):
    return drop_from_bucket(store)


def strips(store):
    return strip_in_bucket(store)


@pytest.mark.sample("drops")
@pytest.mark.parametrize("sweep", [drops, strips])
def test_a_pin_and_a_removal(template, no_pause, sweep):
    """What is pinned stays as it is, or there was nothing to pin any more; a state that goes is
    gone before.
    """

    def check(bucket, said):
        if said[pins] is None:
            assert pin_reason(Place(bucket, "checkpoint-1")).endswith(": why")
            whole = without_manifests(below(template, "checkpoint-1"))
            assert (
                without_manifests(objects(bucket)) == whole if said[sweep].why else sweep is strips
            )
        else:
            assert said[sweep].dropped
            assert objects(bucket) == {}

    assert raced(template, pins, sweep, check=check) > 50


@pytest.mark.slow
@pytest.mark.parametrize("other", [drops_too, strips])
def test_two_removals(template, no_pause, other):
    """One gives way, or both do: then the next sweep does it.

    What both wanted gone is never half there.
    """

    def check(bucket, said):
        if said[drops].dropped or (other is drops_too and said[other].dropped):
            assert objects(bucket) == {}
        elif not said[other].stripped:
            assert objects(bucket) == below(template, "checkpoint-1")
        assert marks_in(bucket) == []

    assert raced(template, drops, other, check=check) > 100


def test_a_removal_gives_way_to_what_came_after_the_plan(bucket):
    """Its tombstone is there, and only then marks are looked at: the checkpoint was there all the
    time.
    """

    def meanwhile(act):
        done = []

        def hook(call, where):
            if call == "write" and TOMBSTONE in where and not done:
                done.append(act())

        return hook

    one = bucket.within("checkpoint-1")
    held = hold_lease(Place(one))
    acts = {
        "pinned": lambda: pin(Place(one)),
        "in use": held.__enter__,
        "a save to it": lambda: put_mark(one, SAVING),
        "it was changed": lambda: one.write(MANIFEST_NAME, one.read(MANIFEST_NAME)),
        "another sweep": lambda: put_mark(one, f"{TOMBSTONE}-of-another"),
    }
    for why, act in acts.items():
        before = objects(bucket)
        report = prune_run(Place(Watch(meanwhile(act)).store(bucket)), Keep(last=3))
        assert report.kept[one.url][0].startswith(why)
        assert objects(bucket) == before
        one.delete([name for name in marks_in(one) if not name.startswith(LEASE)])
        if why == "in use":
            held.__exit__(None, None, None)
        assert marks_in(bucket) == []


def test_a_removal_that_takes_too_long_gives_way(bucket, monkeypatch):
    """Others take its tombstone for a dead one's after ten minutes."""
    clock = iter([0.0, leases.STALE_SECONDS / 2 + 1])
    monkeypatch.setattr(
        "ft_ckpt.checkpoint.commit.bucket_delete.time.monotonic", lambda: next(clock)
    )
    assert "too slowly" in drop_from_bucket(bucket.within("checkpoint-1")).why[0]
    monkeypatch.undo()
    assert (steps(Place(bucket)), marks_in(bucket)) == ([1, 2, 3, 4], [])


def test_who_waits_for_a_removal_waits_a_minute(bucket, monkeypatch, no_pause):
    """A sweep was killed while it looked: the checkpoint is there, and can be opened ten minutes
    later.
    """
    monkeypatch.setattr(marks, "_PATIENCE_SECONDS", 0.0)
    place = Place(bucket, "checkpoint-1")
    put_mark(place.folder, f"{TOMBSTONE}-of-a-dead-one")
    for act in (
        lambda: open_checkpoint(open_place(place)).__enter__(),
        lambda: pin(open_place(place)),
    ):
        with pytest.raises(UnreadableError, match="is being deleted"):
            act()
    unpin(open_place(place))
    assert verify(place).ok
    with open_checkpoint(Place(later(bucket).store, "checkpoint-1")) as held:
        assert held.find_problems(deep=True) == ()


# Leases


def test_what_a_lease_costs(bucket):
    """One write and one deletion, and nothing where nothing is held."""
    watch = Watch()
    store = watch.store(bucket.within("checkpoint-1"))
    with open_checkpoint(Place(store)) as held:
        assert [name for name in marks_in(bucket) if LEASE in name]
        assert not [each.name for each in held.store.list() if each.name.startswith(LEASE)]
    assert sorted(watch.calls) == ["delete", "list", "open", "stat", "stat", "write"]
    assert marks_in(bucket) == []
    watch.calls.clear()
    assert verify(Place(store), deep=False).ok
    assert not {"write", "delete"} & set(watch.calls)


def test_a_bucket_that_is_read_only_is_read_without_a_lease(bucket):
    store = Watch(refuses_writes).store(bucket.within("checkpoint-1"))
    with open_checkpoint(Place(store)) as held:
        assert held.find_problems(deep=True) == ()
        assert marks_in(bucket) == []


def test_nothing_is_put_where_no_checkpoint_is(bucket):
    watch = Watch(lambda call, where: pytest.fail(where) if call in ("write", "delete") else None)
    with (
        pytest.raises(NotACheckpointError),
        open_checkpoint(Place(watch.store(bucket), "checkpoint-old")),
    ):
        pass


def test_a_lease_is_renewed_and_dead_after_ten_minutes_of_the_stores_clock(bucket, monkeypatch):
    with hold_lease(Place(bucket, "checkpoint-1")) as name:
        assert prune_run(later(bucket, 540), Keep(last=3)).dropped == ()
        assert prune_run(later(bucket), Keep(last=3)).dropped == (f"{bucket.url}/checkpoint-1",)
    with monkeypatch.context() as patch:
        patch.setattr(leases, "RENEWAL_SECONDS", 0.01)
        with hold_lease(Place(bucket, "checkpoint-2")) as name:
            first = bucket.stat(f"checkpoint-2/{name}")
            while bucket.stat(f"checkpoint-2/{name}").version == first.version:
                pass
    assert marks_in(bucket) == []


# What saves left that were killed


def unfinished_save(bucket, cleared=True):
    store = bucket.within("checkpoint-5")
    put_mark(store, SAVING, cleared=cleared)
    store.write("config.json", b"{}")
    store.write("policy/model.safetensors", b"half of it")
    return store


def test_what_dead_saves_left_is_cleared(run, template):
    left = unfinished_save(run)
    for way in (recover_all, lambda place: prune_run(place, Keep())):
        assert not way(later(run, 540)) or objects(left)
    assert sorted(objects(left)) == ["config.json", "policy/model.safetensors"]
    assert recover_all(later(run)) == ("checkpoint-5: removed what was left of a save",)
    assert [each.name for each in left.list()] == [SAVING]
    left.write("policy/late.safetensors", b"of one that was thought dead")
    assert prune_run(later(run), Keep()).freed_bytes == len(b"of one that was thought dead")
    assert recover_all(later(run, DAY - 60)) == ()
    assert [each.name for each in left.list()] == [SAVING]
    prune_run(later(run, DAY), Keep())
    assert (left.list(), objects(run)) == ([], template)


def test_what_is_no_remains_of_a_save_stays(bucket, template):
    """A mark in a folder that was not clear; another run in one that was; a checkpoint; and what
    has no mark.
    """
    unfinished_save(bucket, cleared=False)
    put_mark(bucket.within("checkpoint-1"), SAVING, cleared=True)
    # a model that is saved into the folder of the run itself
    put_mark(bucket, SAVING, cleared=True)
    put_mark(bucket.within("runs"), SAVING, cleared=True)
    for name, data in template.items():
        bucket.write(f"runs/{name}", data)
    before = objects(bucket)
    for way in (recover_all, lambda place: prune_run(place, Keep())):
        way(later(bucket, DAY))
    assert objects(bucket) == before


def test_sweeps_of_a_dead_save_are_stopped_at_each_request(template):
    def trial(world):
        bucket = filled(new_bucket(), template)
        left = unfinished_save(bucket)
        world.watch.age(bucket, TEN_MINUTES)
        world.run(recover_all, Place(world.watch.store(bucket)))
        check_meanwhile(bucket, template)
        recover_all(later(bucket))
        assert (objects(left), objects(bucket)) == ({}, template)
        assert marks_in(bucket) == [f"checkpoint-5/{SAVING}"]

    assert try_worlds(trial, Requests("stopped"), every=3).calls > 8


def test_a_sweep_gives_way_to_a_save_that_takes_over(template):
    """The mark was dead when it was listed, and is not when the tombstone is there."""
    bucket = filled(new_bucket(), template)
    left = unfinished_save(bucket)
    watch = Watch()
    watch.age(bucket, TEN_MINUTES)
    watch.hook = lambda call, where: (
        TOMBSTONE in where and call == "write" and put_mark(left, SAVING, cleared=True)
    )
    assert recover_all(Place(watch.store(bucket))) == ()
    assert len(objects(left)) == 2


def test_what_cannot_be_swept_is_warned_of(bucket):
    """Nobody who resumes has to write there first."""
    with pytest.warns(UserWarning, match="leftovers of dead saves were not removed"):
        assert recover_all(Place(Watch(refuses_writes).store(bucket))) == ()


def test_a_save_deletes_what_is_its_own_alone(bucket, template):
    """Overwriting a checkpoint that lies around others; taking a mark over whose process died
    before it looked.
    """
    for name, data in below(template, "checkpoint-1").items():
        bucket.write(name.partition("/")[2], data)  # a model in the folder of the run itself
    before = objects(bucket)
    above = bucket.parent
    with pytest.raises(TargetError, match="files that belong to no checkpoint are in the way"):
        open_object_staging(above, "runs", overwrite=True)
    put_mark(bucket.within("checkpoint-old"), SAVING, run_id="mine", cleared=False)
    with pytest.raises(TargetError, match="files that belong to no checkpoint are in the way"):
        open_object_staging(bucket, "checkpoint-old", run_id="mine")
    assert objects(bucket) == before
    open_object_staging(bucket, "checkpoint-1", overwrite=True).discard()
    left = unfinished_save(bucket)
    put_mark(left, SAVING, run_id="mine", cleared=True)
    open_object_staging(bucket, "checkpoint-5", run_id="mine").mark.stop()
    assert (objects(left), read_mark(left, SAVING)["cleared"]) == ({}, True)
    assert steps(Place(bucket)) == [1, 2, 3, 4]
