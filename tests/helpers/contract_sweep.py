"""Contract tests of sweeps in every kind of store.

Inherit `SweepContract` and define a fixture `run`, the place of a run with the files of
`run_of_four`.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from small_checkpoints import save_with_state

from ft_ckpt import Keep
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.leases import pin, pin_reason, unpin
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.runs.folder import PruneReport, make_room, prune_run, survey_run
from ft_ckpt.storage.places import Place, open_place

KEEP = Keep(last=2, state=Keep(last=1))  # of four drops two and strips one
LAST_ONE = Keep(last=1, state=Keep(last=1))


def run_of_four(root: Path) -> None:
    """Write four checkpoints with a state, of which the third is the best, and files of others."""
    for step in (1, 2, 3, 4):
        metrics = {"loss": abs(3 - step)}
        save_with_state(root / f"checkpoint-{step}", step, world=1, run_id="mine", metrics=metrics)
    (root / "checkpoint-2" / "notes.txt").write_text("mine")
    (root / "checkpoint-old").mkdir()
    (root / "checkpoint-old" / "pytorch_model.bin").write_text("of another tool")


def steps(run: Place) -> list[int | None]:
    return [info.manifest.step for info in discover(run)]


def stateful(run: Place) -> list[int | None]:
    return [info.step for info in survey_run(open_place(run)) if info.has_state]


def files_of(run: Place) -> dict[str, bytes]:
    """Return the bytes of all files but marks, by name."""
    names = [stored.name for stored in run.folder.list()]
    return {name: run.folder.read(name) for name in names if "/.ft_ckpt-" not in f"/{name}"}


def below(files: dict[str, bytes], *folders: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.partition("/")[0] in folders}


def names_of(places: Iterable[Path | str]) -> list[str]:
    """Return the last step of each path or URL."""
    return [str(place).rpartition("/")[2] for place in places]


def first_reasons(report: PruneReport) -> list[str]:
    """Return why each checkpoint is kept, without the process that guards it."""
    return [reasons[0].partition(" by ")[0] for reasons in report.kept.values()]


class SweepContract:
    def test_the_last_stay_whole(self, run: Place) -> None:
        before = files_of(run)
        report = prune_run(open_place(run), KEEP)
        assert (steps(run), stateful(run), report.problems) == ([3, 4], [4], ())
        assert names_of(report.dropped) == ["checkpoint-1", "checkpoint-2"]
        assert names_of(report.stripped) == ["checkpoint-3"]
        assert names_of(report.kept) == ["checkpoint-3", "checkpoint-4"]
        assert names_of(report.left) == ["notes.txt"]
        assert all(verify(info.place).ok for info in discover(run))
        after = files_of(run)
        untouched = ("checkpoint-4", "checkpoint-old")
        assert below(after, *untouched) == below(before, *untouched)
        assert [*below(after, "checkpoint-1", "checkpoint-2")] == ["checkpoint-2/notes.txt"]
        deleted = {name for name in before.keys() - after.keys() if "ft_ckpt.json" not in name}
        assert report.freed_bytes == sum(len(before[name]) for name in deleted)
        assert prune_run(open_place(run), KEEP) == PruneReport(report.kept)
        assert len(files_of(run)) == len([*run.folder.list()]), "no marks are left"

    def test_a_state_goes_and_the_weights_stay(self, run: Place) -> None:
        before = files_of(run)
        prune_run(open_place(run), Keep(last=4, state=Keep(last=1)))
        assert (steps(run), stateful(run)) == ([1, 2, 3, 4], [4])
        after = files_of(run)
        for step in (1, 2, 3):
            name = f"checkpoint-{step}"
            assert verify(Place(run.folder, name)).ok
            assert "training state" in read_manifest(Place(run.folder, name)).notes[-1]
            manifest = f"{name}/ft_ckpt.json"
            weights = below(before, name)
            for path in list(weights):
                if path.startswith((f"{name}/state", manifest)):
                    del weights[path]
            assert below(after, name).items() >= weights.items()
            assert below(after, name).keys() == weights.keys() | {manifest}

    def test_a_dry_run_foretells_and_does_nothing(self, run: Place) -> None:
        before = files_of(run)
        foretold = prune_run(open_place(run), KEEP, dry_run=True)
        assert files_of(run) == before
        assert replace(prune_run(open_place(run), KEEP), left=()) == foretold

    def test_the_best_and_the_newest_stay(self, run: Place) -> None:
        prune_run(open_place(run), Keep(best=("loss", "min")))
        assert steps(run) == [3, 4]

    def test_guarded_ones_stay(self, run: Place) -> None:
        before = files_of(run)
        places = {step: Place(run.folder, f"checkpoint-{step}") for step in (1, 2, 3)}
        for step in (1, 2):
            pin(places[step], "the paper's")
        with open_checkpoint(places[2]):
            report = prune_run(open_place(run), LAST_ONE, protect=[open_place(places[3])])
            unpin(places[2])
            unpinned = prune_run(open_place(run), Keep(last=1), protect=[open_place(places[3])])
        assert (steps(run), files_of(run)) == ([1, 2, 3, 4], before)
        assert first_reasons(report) == ["pinned", "pinned", "protected", "newest valid"]
        assert first_reasons(unpinned)[1] == "in use"
        prune_run(open_place(run), Keep(last=1))
        assert steps(run) == [1, 4]
        reason = pin_reason(places[1])
        assert reason is not None
        assert reason.endswith(": the paper's")

    def test_damaged_ones_take_no_place(self, run: Place) -> None:
        """The newest cannot be loaded, and the one before it is not deleted for its sake."""
        run.folder.delete(["checkpoint-4/config.json"])
        prune_run(open_place(run), Keep(last=1))
        assert steps(run) == [3, 4]
        run.folder.delete(["checkpoint-3/state/position.json"])
        prune_run(open_place(run), Keep(last=1))
        assert steps(run) == [3, 4]  # none is valid: nothing is certain

    def test_room_is_made_for_the_one_to_come(self, run: Place) -> None:
        """On a full disk, what the next checkpoint replaces goes now, except the last valid one."""
        report = make_room(open_place(run), Keep(last=4), 5, run_id="mine")
        assert names_of(report.dropped) == ["checkpoint-1"]
        report = make_room(open_place(run), LAST_ONE, 5, run_id="mine")
        assert names_of(report.dropped) == ["checkpoint-2", "checkpoint-3"]
        report = make_room(open_place(run), LAST_ONE, 5, run_id="mine")
        assert list(report.kept.values()) == [("newest valid",)]
        assert report.dropped == report.stripped == ()
        run.folder.delete(["checkpoint-4/config.json"])
        assert make_room(open_place(run), Keep(every_steps=100), 5, run_id="mine").dropped == ()
