"""Builds the wheel and the source distribution of the commit that is checked out, and tries them.

Uploads nothing.

    scripts/release                   # writes dist/: wheel, source distribution, SHA256SUMS
    scripts/release --out FOLDER
    FT_CKPT_PROJECT_URL=https://HOST/OWNER/NAME scripts/release

Changes that are not committed are not in them. Two builds must be equal byte for byte, and so must
the wheel that is built from the source distribution. The wheel is installed into an environment of
its own, without the checkout, where its commands answer and the script of README.md trains; the
libraries are those of the environment that runs this.
"""

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
# the address of the repository, for the links of the description: see setup.py
URL = "FT_CKPT_PROJECT_URL"
FIELDS = ("summary", "description", "author", "keywords", "classifiers", "license_expression")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def main() -> None:
    out = parse_arguments().out.absolute()
    os.umask(0o022)  # modes of files are in both archives
    commit, seconds = git("show", "--no-patch", "--format=%H %ct", "HEAD").split()
    os.environ["SOURCE_DATE_EPOCH"] = seconds
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        first = build_both(checkout(folder / "one"), folder / "one built")
        second = build_both(checkout(folder / "two"), folder / "two built")
        step("two builds are equal", *map(compare, first, second))
        wheel, sdist = first
        source = unpack(sdist, folder / "from sdist")
        wheel_of_sdist = build("wheel", source, folder / "from sdist built")
        step("the wheel from the source distribution is equal", compare(wheel, wheel_of_sdist))
        version = check_metadata(wheel, sdist)
        check_content(wheel, folder / "one")
        readme = (folder / "one" / "README.md").read_text(encoding="utf-8")
        try_wheel(wheel, version, readme, folder / "trial")
        out.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy(path, out)) for path in (wheel, sdist)]
    sums = "".join(f"{sha256(path)}  {path.name}\n" for path in files)
    (out / SUMS).write_text(sums, encoding="ascii")
    print(sums + next_steps(version, commit, out, files))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)"
    )
    return parser.parse_args()


# Building


def checkout(folder: Path) -> Path:
    """Write the files of the commit into a new folder; return it."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-c", "safe.directory=*", "-c", "tar.umask=0022", "archive", "HEAD"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def build_both(source: Path, out: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution.

    The latter comes first, before the wheel's build leaves files in the source.
    """
    sdist = build("sdist", source, out)
    make_equal(sdist)
    return build("wheel", source, out), sdist


def build(kind: str, source: Path, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), out],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{kind}: the build failed\n{result.stderr}")
    return out / result.stdout.splitlines()[-1]


def make_equal(sdist: Path) -> None:
    """Write the archive again in the order of names, with the commit's time and no owner.

    setuptools writes the time and the owner of the build.
    """
    time = int(os.environ["SOURCE_DATE_EPOCH"])
    with tarfile.open(sdist) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers()]
        data = io.BytesIO()
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=data, mtime=time) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as equal,
        ):
            for member, content in sorted(members, key=lambda pair: pair[0].name):
                member.mtime = time
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                equal.addfile(member, content)
    sdist.write_bytes(data.getvalue())


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the archive; return the one folder in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


# Checks


def compare(first: Path, second: Path) -> str:
    if first.name != second.name or first.read_bytes() != second.read_bytes():
        raise SystemExit(
            f"{first.name} ({sha256(first)}): another build gave {second.name} ({sha256(second)})"
        )
    return first.name


def check_metadata(wheel: Path, sdist: Path) -> str:
    """Check that the metadata of both are equal and valid; return the version.

    twine checks them, too, if it is installed.
    """
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        text = files.read(name)
    with tarfile.open(sdist) as archive:
        content = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert content is not None
        if content.read() != text:
            raise SystemExit(f"{sdist.name}: its PKG-INFO differs from the wheel's METADATA")
    # raises an error for each field that no index accepts
    metadata = Metadata.from_email(text, validate=True)
    for field in FIELDS:
        if not getattr(metadata, field):
            raise SystemExit(f"{wheel.name}: no {field} in its metadata")
    relative = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", metadata.description or "")
    if relative:
        raise SystemExit(
            f"{wheel.name}: its description has links that lead nowhere on a "
            f"package index: {relative}"
        )
    classifiers = f"{len(metadata.classifiers or ())} classifiers"
    urls = f"no URLs ({URL} is not set)"
    if metadata.project_urls:
        urls = f"{len(metadata.project_urls)} URLs"
    step("metadata", f"ft_ckpt {metadata.version}", classifiers, urls)
    if shutil.which("twine"):
        subprocess.run(["twine", "check", "--strict", wheel, sdist], check=True)
    return str(metadata.version)


def check_content(wheel: Path, source: Path) -> None:
    """Check that the wheel has all modules, their stubs, py.typed, and nothing else."""
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    package = source / "ft_ckpt"
    modules = [path.relative_to(source).as_posix() for path in package.rglob("*.py")]
    stubs = [path.relative_to(source).as_posix() for path in package.rglob("*.pyi")]
    expected = {*modules, *stubs, "ft_ckpt/py.typed"}
    if names != expected:
        raise SystemExit(
            f"{wheel.name}: other files than in the checkout: {sorted(names ^ expected)}"
        )
    step("content", f"{len(modules)} modules, {len(stubs)} stubs, py.typed")


def try_wheel(wheel: Path, version: str, readme: str, folder: Path) -> None:
    """Install the wheel with the libraries of this environment, and run its commands.

    The script of README.md is run, too.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *install], check=True
    )
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file adds the libraries, and not what their own .pth files add, such as an
    # editable ft_ckpt.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (script,) = re.findall(
        r'^```python title="train.py"\n(.*?)^```', readme, re.DOTALL | re.MULTILINE
    )
    program = folder / "train.py"
    program.write_text(script, encoding="utf-8")
    run = (folder / "bin" / "ft-ckpt",)

    def answer(*command: str | Path) -> str:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        environment.pop("PYTHONPATH", None)
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode:
            line = " ".join(map(str, command))
            output = f"{result.stdout}{result.stderr}"
            raise SystemExit(f"{line}: exit status {result.returncode}\n{output}")
        return result.stdout

    place = Path(answer(python, "-c", "import ft_ckpt; print(ft_ckpt.__file__)").strip())
    if not place.is_relative_to(site):
        raise SystemExit(f"ft_ckpt was imported from {place}, not from the installed wheel")
    version_text = answer(*run, "--version")
    help_text = answer(python, "-m", "ft_ckpt", "--help")
    if version not in version_text or "usage: ft-ckpt" not in help_text:
        raise SystemExit(
            f"{wheel.name}: ft-ckpt --version does not answer {version}, or "
            "python -m ft_ckpt has no help"
        )
    answer(python, program)
    answer(*run, "verify", folder / "runs" / "sft")
    step(
        "installed alone",
        "ft-ckpt --version, python -m ft_ckpt --help, the script of README.md, ft-ckpt verify",
    )


# After the checks


def next_steps(version: str, commit: str, out: Path, files: list[Path]) -> str:
    if "dev" in version:
        return (
            f"{version} is in development: upload nothing. A release has its version in "
            "ft_ckpt/_version.py, its date in CHANGELOG.md, and its checkpoints in "
            "tests/golden/checkpoints."
        )
    names = " ".join(str(path) for path in files)
    return (
        f"git tag -a v{version} {commit}, and push the tag\n"
        f"to the Python Package Index: twine upload {names}\n"
        f"to the page of the release: both files, {out / SUMS} and the section {version} of "
        "CHANGELOG.md\n"
        "to the site of the documentation: the folder site, made by mkdocs build --strict"
    )


def git(*arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def step(name: str, *facts: str) -> None:
    print(f"{name}: {', '.join(facts)}", flush=True)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
