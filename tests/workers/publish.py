"""Publishes in forked processes that may be killed: a line of JSON for each, {"checkpoint", "url", "options"}."""

import json
import os
import sys
import traceback
import warnings

import ft_ckpt.engines.publish as publishing
from ft_ckpt.errors import CheckpointError

publishing._RESUME_PAUSE_SECONDS = 0.01


def serve() -> None:
    """Print the process id for each line, and then its exit status."""
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            os._exit(_publish(asked["checkpoint"], asked["url"], asked["options"]))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _publish(checkpoint: str, url: str, options: dict[str, object]) -> int:
    try:
        publishing.publish(checkpoint, url, **options)  # type: ignore[arg-type]
    except CheckpointError:
        return 1
    except BaseException:
        traceback.print_exc()
        return 2
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("ready", flush=True)
    serve()
