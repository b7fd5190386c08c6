"""`ls`, `show`, `latest` and `verify` of runs, of folders of other programs, and of files."""

import shutil

import models
import pytest
from commands import ft_ckpt as ft_ckpt_of
from peft import LoraConfig, get_peft_model
from small_checkpoints import save

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.errors import NotACheckpointError


def hugging_face_model(folder):
    models.build("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with runs, a Trainer's output_dir, a model and an adapter."""
    root = tmp_path_factory.mktemp("places")
    for run, steps in {"a": (1, 2), "b": (5,)}.items():
        for step in steps:
            save(root / "runs" / run / f"checkpoint-{step}", step=step)
    hugging_face_model(root / "model")
    shutil.copytree(root / "model", root / "output" / "checkpoint-10")
    (root / "output" / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(models.build("llama"), settings)
    adapted.save_pretrained(root / "adapter")
    CheckpointSaver(directory=root / "lora").save(
        adapted, root / "lora" / "checkpoint-3", adapter_only=True, step=3
    )
    return root


def test_ls_of_a_folder_of_runs(places):
    answer = ft_ckpt_of("ls", places / "runs")
    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[1] == ["run", "checkpoints", "step", "age", "size"]
    assert [line[:3] for line in lines[2:4]] == [["a", "2", "2"], ["b", "1", "5"]]
    assert (
        answer.out.splitlines()[4] == f"`ft-ckpt ls {places}/runs/b` lists the checkpoints of one"
    )
    rows = ft_ckpt_of("ls", places / "runs", "--json").document
    assert [(row["path"], row["kind"], row["checkpoints"], row["step"]) for row in rows] == [
        (f"{places}/runs/a", "run", 2, 2),
        (f"{places}/runs/b", "run", 1, 5),
    ]


@pytest.mark.parametrize(
    ("name", "words", "command", "kinds"),
    [
        (
            "output",
            "a Trainer's output_dir with checkpoint-10",
            "output/checkpoint-10",
            ["Trainer checkpoint"],
        ),
        ("model", "a Hugging Face model (LlamaForCausalLM)", "model", ["model"]),
        ("adapter", "a PEFT adapter", "adapter", ["adapter"]),
    ],
)
def test_ls_of_folders_of_other_programs(places, name, words, command, kinds):
    answer = ft_ckpt_of("ls", places / name)
    assert answer.code == 0
    assert answer.out.startswith(f"{places / name}: {words}")
    assert answer.out.splitlines()[-1] == f"`ft-ckpt show {places / command}` describes its model"
    rows = ft_ckpt_of("ls", places / name, "--json").document
    assert [row["kind"] for row in rows] == kinds


def test_ls_shows_kind_best_and_reasons(tmp_path):
    """The rules come from the newest training state; the pin is a reason of its own."""
    model = models.build("llama")
    keep = Keep(last=1, best=("loss", "min"))
    with CheckpointSaver(directory=tmp_path, every=1, keep=keep) as saver:
        saver.register(model=model)
        saver.resume()
        for loss in (1.0, 0.5, 0.7):
            saver.step({"loss": loss})
    rows = ft_ckpt_of("ls", tmp_path, "--json").document
    assert [(row["step"], row["best"], row["kept"]) for row in rows] == [
        (2, ["loss"], ["best loss"]),
        (3, [], ["newest valid", "last 1"]),
    ]
    lines = ft_ckpt_of("ls", tmp_path).out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "age", "size", "kind", "loss", "kept"]
    assert "full+state" in lines[1]
    assert "0.5 best" in lines[1]
    assert "best" not in lines[2]


def test_show_begins_with_the_class_and_the_parameters(places):
    model = models.build("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    lines = ft_ckpt_of("show", places / "model").out.splitlines()
    assert lines[0] == f"{places}/model: LlamaForCausalLM, {count:,} parameters in float32"
    assert lines[1].startswith("  llama, ")
    document = ft_ckpt_of("show", places / "model", "--json").document
    assert (document["model"]["class_name"], document["model"]["parameters"]) == (
        "LlamaForCausalLM",
        count,
    )


@pytest.mark.parametrize("name", ["adapter", "lora/checkpoint-3"])
def test_show_of_an_adapter_names_rank_targets_and_base(places, name):
    lines = ft_ckpt_of("show", places / name).out.splitlines()
    assert lines[0].startswith(f"{places / name}: LoRA adapter")
    assert lines[0].endswith(" parameters in float32")
    assert lines[1] == "  rank 4, alpha 8, on q_proj, v_proj"
    assert lines[2].startswith("  base: ")


@pytest.mark.parametrize("command", ["show", "verify", "diff", "prune"])
def test_a_folder_of_runs_is_named_where_one_is_expected(places, command):
    options = {"diff": [places / "model"], "prune": ["--last", "1"]}.get(command, [])
    answer = ft_ckpt_of(command, places / "runs", *options)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"ft-ckpt: {places}/runs: a folder of runs: a, b; name one of them\n"


def test_verify_says_that_a_file_is_truncated(places, tmp_path):
    shutil.copytree(places / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    answer = ft_ckpt_of("verify", tmp_path / "model")
    assert answer.code == 1
    size = len(content)
    expected = (
        f"  model.safetensors: truncated: {size - 10:,} bytes, but its header describes {size:,}"
    )
    assert answer.out.splitlines()[1].startswith(expected)


def test_latest_is_none_where_there_is_nothing_and_an_error_for_a_file(places, tmp_path):
    """In Python None, in the command exit code 1: a script may ask before the first save."""
    for place in (tmp_path, tmp_path / "absent", places / "model", places / "runs"):
        assert ft_ckpt.latest(place) is None
        answer = ft_ckpt_of("latest", place)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.startswith(f"ft-ckpt: {place}: ")
    file = places / "model" / "config.json"
    with pytest.raises(NotACheckpointError, match=r"config\.json: a file, expected a folder"):
        ft_ckpt.latest(file)
    assert ft_ckpt_of("latest", file).code == 2
