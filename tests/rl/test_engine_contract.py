"""The contract of servers, on vLLM's and SGLang's; and a fault that only requests of vLLM meet."""

import pytest
from contract_server import FAULTS, ServerContract, check_all_or_none, check_fault
from engine_files import EngineFiles
from engine_server import serving
from faults import Server, World


class TestVllm(ServerContract):
    kind = "vllm"
    load_adapter = "/v1/load_lora_adapter"
    pause = "/pause"
    resume = "/resume"
    load_weights = "/collective_rpc"
    digests = "/weight_checker"

    @pytest.mark.parametrize("number", [13, 14, 15])
    def test_a_call_that_is_missing(self, number: int, files: EngineFiles) -> None:
        """Such as the version, which is read before it is set."""
        with self.holding(files) as engines:
            world = World(Server(engines[-1], FAULTS), "404", number)
            check_fault(files, engines, engines[-1].state(), "weights", world)
            assert world.is_met


class TestSglang(ServerContract):
    kind = "sglang"
    load_adapter = "/load_lora_adapter"
    pause = "/pause_generation"
    resume = "/continue_generation"
    load_weights = "/update_weights_from_disk"
    digests = "/weights_checker"


def test_all_servers_or_none_of_two_engines(files: EngineFiles) -> None:
    with serving(files.base) as one, serving(files.base, "sglang") as two:
        check_all_or_none(
            files, one, two, lambda: two.fail("/update_weights_from_disk", cuts="before")
        )
