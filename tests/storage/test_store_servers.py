"""The contract of stores on other people's servers and emulators, each left out by name where it is
not installed.
"""

import uuid

import pytest
from contract_store import StoreContract
from store_servers import Absent, running_azurite, running_ceph, running_moto, running_s3rver

from ft_ckpt.storage.places import open_place

pytestmark = pytest.mark.slow


class ServerContract(StoreContract):
    @pytest.fixture(scope="class")
    def server(self, request, tmp_path_factory):
        pytest.importorskip("obstore")
        try:
            with request.param(tmp_path_factory.mktemp("server")) as url:
                yield url
        except Absent as absent:
            pytest.skip(str(absent))

    @pytest.fixture
    def store(self, server):
        return open_place(f"{server}/{uuid.uuid4().hex}").folder


@pytest.mark.parametrize("server", [running_moto, running_ceph, running_azurite], indirect=True)
class TestServers(ServerContract):
    pass


@pytest.mark.parametrize("server", [running_s3rver], indirect=True)
class TestS3rver(ServerContract):
    def test_create_only_has_one_winner(self, store):
        """It has none: this store passes over conditions, which a run finds out before it
        trains.
        """
        store.write("lock", b"first", create_only=True)
        store.write("lock", b"second", create_only=True)
        assert store.read("lock") == b"second"
