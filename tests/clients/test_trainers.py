"""Programs that train: by their own entry points, killed twice, resumed, and their result read by
their own loaders.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from clients import log_of, needs, run_client

pytestmark = pytest.mark.slow
REFUSED = 3  # exit status, see tests/workers/clients_trainers.py

LORA = {"finetuning_type": "lora", "lora_target": "all"}
FULL = {"finetuning_type": "full"}
LLAMA_FACTORY: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora-plus": {**LORA, "loraplus_lr_ratio": 16},
    "rslora-dora": {**LORA, "use_rslora": True, "use_dora": True},
    "pissa": {**LORA, "pissa_init": True},
    "full": FULL,
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "muon": {**FULL, "use_muon": True},
    "dpo": {**LORA, "stage": "dpo"},
}
SWIFT = {
    "lora": {"tuner_type": "lora", "target_modules": "all-linear"},
    "full": {"tuner_type": "full"},
}


def ends_with_the_same_bits(program: str, settings: dict[str, Any], folder: Path) -> None:
    done = run_client("clients_trainers", program, folder, json.dumps(settings))
    assert done.returncode == 0, log_of(done)
    assert done.stdout.endswith("done\n"), log_of(done)


@needs("llamafactory")
@pytest.mark.parametrize("case", LLAMA_FACTORY)
def test_llama_factory(case: str, tmp_path: Path) -> None:
    ends_with_the_same_bits("llama_factory", LLAMA_FACTORY[case], tmp_path)


@needs("llamafactory")
def test_reward_models_of_llama_factory_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """Their value head is written by a callback that deletes model.safetensors of the
    checkpoint.
    """
    settings = {**LORA, "stage": "rm"}
    done = run_client("clients_trainers", "llama_factory", tmp_path, json.dumps(settings))
    assert done.returncode == REFUSED, log_of(done)


@needs("llamafactory")
def test_the_page_of_llama_factory(tmp_path: Path) -> None:
    done = run_client("clients_page", "llama-factory", tmp_path)
    assert done.returncode == 0, log_of(done)


@needs("ms-swift")
def test_the_page_of_ms_swift(tmp_path: Path) -> None:
    done = run_client("clients_page", "ms-swift", tmp_path)
    assert done.returncode == 0, log_of(done)


@needs("ms-swift")
@pytest.mark.parametrize("case", SWIFT)
def test_ms_swift(case: str, tmp_path: Path) -> None:
    ends_with_the_same_bits("swift", SWIFT[case], tmp_path)


@needs("trl")  # whose environment has it, and Sentence Transformers of the common one
def test_sentence_transformers(tmp_path: Path) -> None:
    ends_with_the_same_bits("sentence_transformers", {}, tmp_path)
