"""DeepSpeed's own checkpoints: the trained weights come back bit for bit, frozen and tied ones too."""

import shutil

import pickles
import pytest
import torch
from buckets import in_bucket
from launch import run_cases
from safetensors.torch import load_file

from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.formats import deepspeed
from ft_ckpt.storage.place import open_place

CASES = (
    "zero1/partly_frozen",
    "zero1_bf16/policy_and_value",
    "zero2/lora",
    "zero2_bf16/partly_frozen",
    "zero3/partly_frozen",
    "zero3/lora",
    "zero3_bf16/policy_and_value",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder for each case: `saved/` by two ranks of DeepSpeed, `truth.safetensors` gathered by it."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    errors = run_cases("foreign", CASES, folder, timeout=280, env={"DS_ACCELERATOR": "cpu"})
    assert {case: error for case, error in errors.items() if error} == {}
    return folder


@pytest.fixture
def saved(written, tmp_path):
    """A copy of one case's folder, to be damaged."""

    def copy(case):
        shutil.copytree(written / case / "saved", tmp_path / "saved")
        return tmp_path / "saved"

    return copy


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_were_trained(written, case):
    """Zero_to_fp32 loses lm_head or frozen weights."""
    check_weights(open_place(written / case / "saved"), load_file(written / case / "truth.safetensors"))


def check_weights(place, truth):
    file = deepspeed.open_deepspeed(place)
    assert set(file.specs) | set(file.ties) == set(truth)
    for name, tensor in truth.items():
        kept = file.ties.get(name, name)
        found = file.read(kept).view(file.specs[kept].shape)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found, tensor), name
        assert torch.equal(file.read(kept, 3, 11), tensor.reshape(-1)[3:11]), name


def test_tied_weights_come_once(written):
    file = deepspeed.open_deepspeed(open_place(written / "zero3/partly_frozen" / "saved"))
    assert file.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_bucket_is_read_like_a_folder(written):
    case = written / "zero3/partly_frozen"
    check_weights(in_bucket(case / "saved"), load_file(case / "truth.safetensors"))


def test_the_folder_of_the_step_is_as_good_as_the_one_above(written):
    above = written / "zero2/lora" / "saved"
    assert (
        deepspeed.open_deepspeed(open_place(above / "global_step1")).specs
        == deepspeed.open_deepspeed(open_place(above)).specs
    )


@pytest.mark.parametrize("case", ["zero2/lora", "zero3/lora"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_files_of_a_rank_that_are_missing_are_noticed(saved, case, kind):
    folder = saved(case)
    last = sorted(folder.glob(f"*/*_{kind}_states.pt"))[-1]
    last.unlink()
    with pytest.raises((CorruptError, LoadError), match="global_step1"):
        deepspeed.open_deepspeed(open_place(folder))


def test_a_shorter_piece_is_noticed(saved):
    folder = saved("zero2/lora")
    for file in folder.glob("*/*_optim_states.pt"):
        state = torch.load(file, weights_only=False)
        groups = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:-40].clone()
        torch.save(state, file)
    with pytest.raises(CorruptError, match=r"cut short|do not fit together"):
        deepspeed.open_deepspeed(open_place(folder))


def test_nothing_in_it_is_run(saved, tmp_path):
    folder = saved("zero3/lora")
    file = next(folder.glob("*/*rank_1*_model_states.pt"))
    state = torch.load(file, weights_only=False)
    state["client"] = pickles.evil(tmp_path / "mark")["system"]
    torch.save(state, file)
    with pytest.raises(LoadError, match=r"refers to posix\.system"):
        deepspeed.open_deepspeed(open_place(folder))
    assert not (tmp_path / "mark").exists()


def test_a_model_in_parallel_parts_is_refused(saved):
    folder = saved("zero2/lora")
    file = next(folder.glob("*/mp_rank_00_model_states.pt"))
    shutil.copy(file, file.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(LoadError, match="parallel parts"):
        deepspeed.open_deepspeed(open_place(folder))


def test_a_folder_without_any_is_no_checkpoint(tmp_path):
    with pytest.raises(LoadError, match="save_checkpoint"):
        deepspeed.open_deepspeed(open_place(tmp_path))
