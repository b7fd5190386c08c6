"""scripts/release: the same files from every build of a commit, and a description that stands
alone.
"""

import gzip
import hashlib
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile

import pytest
from places import ROOT

RELEASE = runpy.run_path(str(ROOT / "scripts" / "release.py"))
SETUP = runpy.run_path(str(ROOT / "setup.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGET = re.compile(r'(?:\]\(|src(?:set)?=")([^)"\s]+)')


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="it builds a commit")
def test_two_runs_build_and_try_the_same_files(tmp_path):
    first, second = (release(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert {name.split("-")[-1] for name in first} >= {"any.whl", "SHA256SUMS"}
    sums = dict(reversed(line.split("  ")) for line in first["SHA256SUMS"].decode().splitlines())
    files = {name: data for name, data in first.items() if name != "SHA256SUMS"}
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_another_build_that_differs_ends_the_release(tmp_path):
    first, second = (tmp_path / name / "ft_ckpt-1-py3-none-any.whl" for name in ("first", "second"))
    for path, text in {first: "same", second: "same"}.items():
        path.parent.mkdir()
        path.write_text(text)
    assert RELEASE["compare"](first, second) == first.name
    second.write_text("other")
    with pytest.raises(SystemExit, match="another build gave"):
        RELEASE["compare"](first, second)


def test_builds_at_other_times_by_other_users_become_equal(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    archives = []
    for time, owner, names in ((1, "one", "ab"), (2, "other", "ba")):
        archives.append(tmp_path / f"{owner}.tar.gz")
        with (
            gzip.GzipFile(archives[-1], "wb", mtime=time) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name in names:
                (tmp_path / name).write_text(name)
                member = archive.gettarinfo(tmp_path / name, name)
                member.mtime, member.uname = time, owner
                with (tmp_path / name).open("rb") as content:
                    archive.addfile(member, content)
        RELEASE["make_equal"](archives[-1])
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        assert [(each.name, archive.extractfile(each).read()) for each in archive] == [
            ("a", b"a"),
            ("b", b"b"),
        ]


def test_with_an_address_every_link_of_the_description_leads_to_a_file_of_the_tag():
    address = "https://example.org/owner/ft_ckpt"
    targets = TARGET.findall(SETUP["long_description"](README, "1.2.3", f"{address}/"))
    assert len(targets) == len(TARGET.findall(README)) > 40
    outside = [target for target in targets if not target.startswith("#")]
    prefix = re.compile(rf"{address}/(blob|raw)/v1\.2\.3/([^#]+)")
    found = {match[2]: match[1] for match in map(prefix.match, outside) if match}
    assert [target for target in outside if not prefix.match(target)] == []
    assert [path for path in found if not (ROOT / path).exists()] == []
    assert [path for path, kind in found.items() if (kind == "raw") != path.endswith(".svg")] == []


def test_without_an_address_the_description_is_text_with_its_code():
    text = SETUP["long_description"](README, "1.2.3")
    assert [target for target in TARGET.findall(text) if not target.startswith("#")] == []
    assert "<picture" not in text
    assert "License: Apache-2.0\n" in text
    assert re.findall(r"```.*?```", text, re.DOTALL) == re.findall(r"```.*?```", README, re.DOTALL)


def test_links_to_elsewhere_and_code_stay_as_they_are():
    text = "[a](https://a.org) [b](#b) [c](c.md)\n```python\nx = y[0](z)\n```\n"
    changed = SETUP["long_description"](text, "1", "https://h/o/n")
    assert changed == text.replace("(c.md)", "(https://h/o/n/blob/v1/c.md)")


def test_addresses_are_stated_if_there_is_one():
    assert SETUP["project_urls"]("1") == {}
    urls = SETUP["project_urls"]("1", "https://h/o/n/")
    assert urls["Repository"] == "https://h/o/n"
    assert all((ROOT / url.split("/v1/")[1]).exists() for url in urls.values() if "/v1/" in url)


@pytest.mark.parametrize(
    "change", [{"ft_ckpt/model.py": "left behind"}, {"tests/test_it.py": ""}, None]
)
def test_a_wheel_with_other_files_than_the_package_is_refused(tmp_path, change):
    (tmp_path / "ft_ckpt").mkdir()
    (tmp_path / "ft_ckpt" / "saver.py").touch()
    files = {
        "ft_ckpt/saver.py": "",
        "ft_ckpt/py.typed": "",
        "ft_ckpt-1.dist-info/METADATA": "",
        **(change or {}),
    }
    if change is None:
        del files["ft_ckpt/saver.py"]
    with zipfile.ZipFile(tmp_path / "ft_ckpt.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    with pytest.raises(SystemExit, match="other files than in the checkout"):
        RELEASE["check_content"](tmp_path / "ft_ckpt.whl", tmp_path)


@pytest.mark.parametrize(
    ("version", "words"), [("0.3.0.dev0", "upload nothing"), ("0.3.0", "git tag -a v0.3.0 c0ffee")]
)
def test_a_version_in_development_is_not_uploaded(tmp_path, version, words):
    printed = RELEASE["next_steps"](version, "c0ffee", tmp_path, [tmp_path / "ft_ckpt.whl"])
    assert words in printed
    assert ("twine upload" in printed) == ("dev" not in version)


def release(folder):
    """Every file that a run has written, by name."""
    command = [sys.executable, "scripts/release.py", "--out", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed alone" in done.stdout
    return {path.name: path.read_bytes() for path in folder.iterdir()}
