"""Runs programs in the environment of tests/clients, which scripts/clients_environment makes."""

import os
import signal
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from places import ROOT, WORKERS, python_path

ENVIRONMENT = Path(os.environ.get("FT_CKPT_CLIENTS", ROOT / ".venv-clients"))
KILLED = -signal.SIGKILL


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test unless the environment has these distributions."""
    folders = [str(path) for path in ENVIRONMENT.glob("lib/python3*/site-packages")]
    names = [distribution.metadata["Name"] for distribution in distributions(path=folders)]
    installed = {name.replace("_", "-").lower() for name in names}
    missing = sorted({*packages} - installed)
    reason = f"no {', '.join(missing)}: run scripts/clients_environment"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run_client(
    worker: str, *arguments: object, ranks: int = 1, timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run `tests/workers/{worker}.py` with the environment's Python, on one rank or several."""
    python = [str(ENVIRONMENT / "bin/python")]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    programs = [str(ENVIRONMENT / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": python_path(),
        "PYTHONWARNINGS": "ignore",
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, which knows older libraries
        "USE_MODELSCOPE_HUB": "0",
        "WANDB_DISABLED": "true",
    }
    command = [*python, str(WORKERS / f"{worker}.py"), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def log_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the exit status and the end of the output of a program, for a failed assertion."""
    return f"exit status {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
