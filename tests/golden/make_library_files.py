"""Files that other libraries write, made anew by those libraries: `python make_library_files.py lightning keras ...`.

Each library is imported by its own function, in an environment that has it. The tensor number i of a model, in the
order of its library, is i * 100 + 0, 0.5, 1, ...: the tests know them by that.
"""

import enum
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "libraries"


def values(number, shape):
    return (np.arange(int(np.prod(shape)), dtype="float64") / 2 + 100 * number).reshape(tuple(shape))


@dataclass
class Config:
    """A class that no reader of the file has."""

    width: int = 3


class Kind(enum.Enum):
    """Another one."""

    PLAIN = "plain"


def lightning():
    """`lightning.ckpt`: a module with tied weights, three types, and settings of classes of its own."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self, config, rate=0.1, where=None, kind=None, act=None):
            super().__init__()
            self.save_hyperparameters()
            self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            self.half = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
            self.tied = self.model[0]

        def training_step(self, batch, _):
            return self.model(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.5)

    net = Net(Config(), where=Path("/x"), kind=Kind.PLAIN, act=torch.relu)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder)  # fmt: skip
        data = torch.utils.data.TensorDataset(torch.ones(4, 3))
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=2))
    for number, tensor in enumerate(net.state_dict().values()):
        tensor.copy_(torch.from_numpy(values(number, tensor.shape)))
    trainer.save_checkpoint(HERE / "lightning.ckpt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        globals()[name]()
