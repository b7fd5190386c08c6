"""The nodes that the tests of a file share, see tests/helpers/network_nodes.py."""

from collections.abc import Iterator

import pytest
from namespaces import can_mount
from network_nodes import Nodes, running_nodes, stands


@pytest.fixture(scope="module", params=stands())
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """Start nodes on each network file system."""
    if not can_mount():
        pytest.skip("needs namespaces of mounts, which root has")
    kind, cache_seconds, name = request.param
    with running_nodes(kind, cache_seconds, tmp_path_factory.mktemp("nodes"), name) as nodes:
        yield nodes
