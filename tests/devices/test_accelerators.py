"""Everything that a checkpoint needs of an accelerator, on a device that shows each read of its memory and missed wait.

Marked `accelerator`: the same on this machine's, where there is one.
"""

import signal

import pytest
import sealed_device
from launch import run_cases, run_python, selected

WAYS = [
    *("whole_model", "large_tensors", "numbers_that_are_none", "adapters", "background", "background_before_the_copy"),
    *("exact_memory", "resume", "resume_large", "load_onto", "single_files", "frozen_reuse"),
]
EAGER = [f"{way}/eager" for way in ("large_tensors", "background", "resume_large", "load_onto", "single_files")]
POOR = ["without_streams", "without_events", "without_waits", "without_registration"]
RANKS = ["unused", "two_ranks"]  # the first one comes first: the other uses the device
BROKEN = ["nobody_waits", "nobody_keeps_blocks", "nobody_marks_the_moment"]

sealed = pytest.mark.skipif(bool(sealed_device.why_missing()), reason=sealed_device.why_missing())
START = (
    "import sealed_device, torch; device = sealed_device.become_accelerator(); tensor = torch.ones(5, device=device); "
)
UNREGISTER = """
host, module = torch.empty(5, pin_memory=True), torch.get_device_module("sealed")
host.copy_(tensor, non_blocking=True)
module.cudaHostUnregister(host.data_ptr())
"""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    return run_cases("accelerators", selected(request, [*WAYS, *EAGER]), tmp_path_factory.mktemp("sealed"), ranks=1)


@pytest.fixture(scope="module")
def poor_outcomes(request, tmp_path_factory):
    cases = selected(request, [*POOR, *BROKEN])
    return run_cases("poor_accelerators", cases, tmp_path_factory.mktemp("poor"), ranks=1)


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    return run_cases("accelerators", selected(request, RANKS), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def outcomes_here(tmp_path_factory):
    return run_cases("accelerators", WAYS, tmp_path_factory.mktemp("here"), ranks=1, env={"FT_CKPT_DEVICE": "here"})


@pytest.mark.sample("whole_model", "large_tensors", "adapters", "background", "resume", "load_onto", "single_files")
@sealed
@pytest.mark.parametrize("case", WAYS)
def test_no_memory_is_read_by_the_host_and_no_wait_is_missed(outcomes, case):
    assert outcomes[case] == ""


@sealed
@pytest.mark.parametrize("case", EAGER)
def test_no_memory_is_used_anew_too_soon(outcomes, case):
    assert outcomes[case] == ""


@pytest.mark.slow
@sealed
@pytest.mark.parametrize("case", POOR)
def test_backends_that_offer_less_are_right_too(poor_outcomes, case):
    assert poor_outcomes[case] == ""


@sealed
@pytest.mark.parametrize("case", BROKEN)
def test_a_missing_wait_shows(poor_outcomes, case):
    assert poor_outcomes[case] == ""


@pytest.mark.sample("unused")
@sealed
@pytest.mark.parametrize("case", RANKS)
def test_two_ranks(two_ranks, case):
    """They write their shares from devices of their own, and use none for a model on the host."""
    assert two_ranks[case] == ""


@pytest.mark.accelerator
def test_a_model_on_the_host_leaves_the_accelerator_of_this_machine_alone(tmp_path):
    assert run_cases("accelerators", ["unused"], tmp_path, env={"FT_CKPT_DEVICE": "here"}) == {"unused": ""}


@pytest.mark.accelerator
@pytest.mark.parametrize("case", WAYS)
def test_on_the_accelerator_of_this_machine(outcomes_here, case):
    assert outcomes_here[case] == ""


@sealed
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import ctypes; ctypes.string_at(tensor.data_ptr(), 4)", -signal.SIGSEGV),
        ("(ctypes := __import__('ctypes')).memset(tensor.data_ptr(), 0, 4)", -signal.SIGSEGV),
        (UNREGISTER, -signal.SIGABRT),
    ],
    ids=["read", "written", "unregistered too soon"],
)
def test_the_device_kills_who_touches_its_memory(code, status):
    assert run_python(START + code).returncode == status


@sealed
def test_a_fork_has_no_part_in_registered_memory():
    """Else its pages would be copied at the next write, and the device would go on with those that nobody sees."""
    code = """
import gc, os
from ft_ckpt.devices import pinned_memory
module, given_back = torch.get_device_module("sealed"), []
type(module).cudaHostUnregister = lambda _, address: given_back.append(address)
memory = pinned_memory(20_000_064, device).fill_(1)
pid = os.fork()
if not pid:
    print(int(memory.sum(dtype=torch.int64)), flush=True)
    del memory
    gc.collect()
    os._exit(len(given_back))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(memory.sum(dtype=torch.int64)))
del memory
print(len(given_back))
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["0", "0", "20000064", "1"], done.stderr


@sealed
def test_what_nobody_waited_for_is_poison():
    code = """
host = torch.empty(5, pin_memory=True)
host.copy_(tensor, non_blocking=True)
print(host.tolist() == [1.0] * 5)
torch.accelerator.current_stream().synchronize()
print(host.tolist() == [1.0] * 5)
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["False", "True"], done.stderr


@sealed
def test_a_stream_sees_what_it_waited_for():
    code = """
stream, host = torch.Stream(device), torch.empty(5, pin_memory=True)
torch.accelerator.synchronize()
tensor += 1
for wait in (False, True):
    if wait:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        stream.wait_event(event)
    with stream:
        host.copy_(tensor, non_blocking=True)
    stream.synchronize()
    print(host[0].item())
"""
    done = run_python(START + code)
    assert done.stdout.split() == ["1.0", "2.0"], done.stderr
