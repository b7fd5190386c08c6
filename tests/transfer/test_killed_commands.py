"""Commands killed at every call that changes the disk, and at every request to a bucket, with readers beside them.

The old checkpoint is whole, or the new one, and the next call of the same command leaves what an undisturbed one does.
"""

import random

import pytest
from command_trials import CommandServer, CommandTrials, all_deaths
from hub_server import serving_hub
from s3_server import running_s3
from seeds import chosen_seed
from small_checkpoints import contents, save_with_state

EVERYWHERE = ["sync", "sync --delete", "prune", "cp", "cp --overwrite", "convert", "convert --overwrite"]
EVERYWHERE += ["convert to a file", "convert over a file", "convert by a library", "average", "average --overwrite"]
EVERYWHERE += ["append", "rebuild", "drop rebuilt"]
MERGES = ["merge", "merge --overwrite"]
OF_BUCKETS = ["push", "pull", "pull to the cache", "cp within a bucket"]
OF_HUB = ["pull from the Hub", "pull a checkpoint from the Hub"]
ALL = [(command, place) for command in (*EVERYWHERE, *MERGES) for place in ("folder", "bucket")]
ALL += [(command, "bucket") for command in OF_BUCKETS] + [(command, "folder") for command in OF_HUB]
SAMPLE = [("sync --delete", "folder"), ("cp --overwrite", "bucket"), ("convert --overwrite", "folder")]
SAMPLE += [("append", "folder"), ("append", "bucket"), ("rebuild", "folder")]
MOST = 6  # deaths of each in the sample


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("obstore")
    with running_s3() as server:
        yield server


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with a repository of files, and one with a checkpoint."""
    folder = tmp_path_factory.mktemp("hub") / "checkpoint"
    save_with_state(folder, 1)
    files = {name: content for name, content in contents(folder).items() if (folder / name).is_file()}
    with serving_hub() as server:
        server.put("org/checkpoint", files)
        server.put(
            "org/base", {"config.json": b"{}", "onnx/model.onnx": b"x" * 5000, "model.safetensors": b"y" * 70_000}
        )
        yield server


@pytest.fixture(scope="module")
def server(shim):
    found = CommandServer(shim)
    yield found
    found.close()


@pytest.fixture(scope="module")
def server_of_all(shim):
    found = CommandServer(
        shim, "models", "deepspeed", "hub_server", "ft_ckpt.saving.merge_files", "ft_ckpt.transfer.hub"
    )
    yield found
    found.close()


def campaign(server, s3, hub_url, folder, command, place, most=0):
    """Try all deaths of a command, or `most` of them; how many there were."""
    trials = CommandTrials(server, s3, command, place == "bucket", folder, {"HUB_OF_TESTS": hub_url})
    deaths, wrong, done = all_deaths(trials), [], 0
    if most:
        deaths = random.Random(chosen_seed()).sample(deaths, min(most, len(deaths)))
    for name, die in deaths:
        found = die()
        done += found is not None
        wrong += [f"{command} into a {place}, {name}: {each}" for each in found or ()]
        print(*wrong[len(wrong) - len(found or ()) :], sep="\n", flush=True)
    print(f"{command} into a {place}: killed {done} times ({trials.calls} calls, {trials.requests} requests)")
    assert wrong == [], "\n".join(wrong[:30])
    assert done > len(deaths) / 2
    return done


@pytest.mark.sample("convert --overwrite-folder", "append-bucket")
@pytest.mark.parametrize(("command", "place"), SAMPLE)
def test_commands_that_are_killed_are_finished_by_the_next_call(server, s3, tmp_path, command, place):
    campaign(server, s3, "", tmp_path, command, place, MOST)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "place"), ALL)
def test_commands_that_are_killed_anywhere_are_finished_by_the_next_call(
    server_of_all, s3, hub, tmp_path, command, place
):
    campaign(server_of_all, s3, hub.url, tmp_path, command, place)
