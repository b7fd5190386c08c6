"""A worker of pytest-xdist that is forked from the fork server: `python worker.py -u -c CODE`.

It has the libraries loaded. This process passes on its stdin, stdout and stderr, and ends with the
worker.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["FT_CKPT_TEST_FORK_SERVER"])
    socket.send_fds(server, [b" "], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[-1], {**os.environ}, os.getcwd()]).encode() + b"\n")  # noqa: PTH109 - starts fast
    while server.recv(1024):
        pass
