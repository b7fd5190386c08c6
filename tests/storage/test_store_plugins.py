"""Stores that other packages bring by an entry point of the group `ft_ckpt.stores`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A store of the scheme shelf://, whose objects are files below the folder SHELVES.
SHELF = '''
"""Shelves: a store that is remote for ft_ckpt."""

import os
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage import RemoteStore, checked_name


@dataclass(frozen=True)
class ShelfStore(RemoteStore):
    """The objects whose files are in `files`; `prefix` is "", or a path with a slash at its end."""

    url: str
    files: LocalStore

    @classmethod
    def from_url(cls, url, **options):
        return cls(url, LocalStore(Path(os.environ["SHELVES"], url.partition("://")[2])))

    @property
    def identity(self):
        return self.url

    @property
    def parent(self):
        if self.url.count("/") == 2:
            return None
        return ShelfStore(self.url.rpartition("/")[0], self.files.parent)

    def within(self, folder):
        return ShelfStore(self.where(folder), self.files.within(checked_name(folder)))

    def where(self, name):
        return f"{self.url}/{name}" if name else self.url

    def read(self, name, start=0, stop=None):
        return self.files.read(name, start, stop)

    def open(self, name):
        return self.files.open(name)

    def write(self, name, data, *, create_only=False):
        self.files.write(name, data, create_only=create_only)

    def create(self, name, size_bytes):
        return self.files.create(name, size_bytes)

    def list(self, prefix=""):
        return self.files.list(prefix)

    def list_folder(self, prefix=""):
        return self.files.list_folder(prefix)

    def stat(self, name):
        return self.files.stat(name)

    def copy(self, name, other, source=None):
        return self.files.copy(name, other, None if source is None else source.files)

    def delete(self, names):
        self.files.delete(names)

    def free_bytes(self):
        return None
'''

SAVE_AND_RESUME = """
import sys

import torch

from ft_ckpt import CheckpointSaver, Every


def start(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = CheckpointSaver(directory=run, every=Every(steps=1))
    saver.register(model=model, optimizer=optimizer)
    return saver, model, optimizer


saver, model, optimizer = start(sys.argv[1])
with saver:
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        saver.step()
again, resumed, _ = start(sys.argv[1])
with again:
    progress = again.resume("must")
    print(progress.step, torch.equal(resumed.weight, model.weight))
"""


def install(folder: Path) -> None:
    """What installing the package leaves in site-packages."""
    (folder / "shelf_store.py").write_text(SHELF)
    facts = folder / "shelf_store-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[ft_ckpt.stores]\nshelf = shelf_store:ShelfStore.from_url\n"
    )


@pytest.fixture
def environment(tmp_path):
    site, shelves = tmp_path / "site", tmp_path / "shelves"
    site.mkdir()
    shelves.mkdir()
    install(site)
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SHELVES": str(shelves)}


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_a_store_of_another_package_takes_saves_resumes_and_commands(environment):
    trained = run(["-c", SAVE_AND_RESUME, "shelf://models/run"], environment)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == "2 True\n"
    listed = run(["-m", "ft_ckpt", "ls", "shelf://models/run"], environment)
    assert listed.returncode == 0, listed.stderr
    assert "checkpoint-1" in listed.stdout
    assert "checkpoint-2" in listed.stdout
    saved = Path(environment["SHELVES"], "models/run/checkpoint-2/model.safetensors")
    assert saved.is_file()


def test_without_the_package_its_scheme_is_refused(tmp_path):
    refused = run(["-m", "ft_ckpt", "ls", "shelf://models/run"], dict(os.environ))
    assert refused.returncode != 0
    assert "shelf://: not a local path" in refused.stderr
