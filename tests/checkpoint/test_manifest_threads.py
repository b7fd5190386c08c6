"""Threads that read their first manifest at the same time, as a resume from a bucket does."""

from launch import run_python
from places import TESTS

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME

MANIFEST = next((TESTS / "golden" / "checkpoints").rglob(MANIFEST_NAME))
# In each process no thread has read a manifest before. With the lock taken out of
# ft_ckpt/schema.py about a third of them end by a segmentation fault of msgspec.
PROCESSES, THREADS = 20, 8
PROGRAM = """
import os, sys, threading
from pathlib import Path
from ft_ckpt.checkpoint.manifest import manifest_from_json

text, processes, count = Path(sys.argv[1]).read_text(), int(sys.argv[2]), int(sys.argv[3])
sys.setswitchinterval(1e-6)
begin = threading.Barrier(count)

def read():
    begin.wait()
    manifest_from_json(text)

for _ in range(processes):
    process = os.fork()
    if not process:
        threads = [threading.Thread(target=read) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_threads_read_their_first_manifest_at_once():
    done = run_python(PROGRAM, MANIFEST, PROCESSES, THREADS)
    assert done.stdout.split() == ["0"] * PROCESSES, done.stderr[-2000:]
