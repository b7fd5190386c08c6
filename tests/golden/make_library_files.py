"""Files that other libraries write, made anew by those libraries: `python make_library_files.py
lightning keras ...`.

Each library is imported by its own function, in an environment that has it. The tensor number i of
a model, in the order of its library, is i * 100 + 0, 0.5, 1, ...: the tests know them by that.
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
    return (np.arange(int(np.prod(shape)), dtype="float64") / 2 + 100 * number).reshape(
        tuple(shape)
    )


@dataclass
class Config:
    """A class that no reader of the file has."""

    width: int = 3


class Kind(enum.Enum):
    """Another one."""

    PLAIN = "plain"


def lightning():
    """`lightning.ckpt`: a module with tied weights, three types, and settings of classes of its
    own.
    """
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
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        data = torch.utils.data.TensorDataset(torch.ones(4, 3))
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=2))
    for number, tensor in enumerate(net.state_dict().values()):
        tensor.copy_(torch.from_numpy(values(number, tensor.shape)))
    trainer.save_checkpoint(HERE / "lightning.ckpt")


def keras():
    """`keras.keras`, `keras.h5`, `keras.weights.h5`: a model in a model; `bfloat16.*`: one layer in
    that type.
    """
    import keras

    inputs = keras.Input((3,), name="inputs")
    inner = keras.Sequential(
        [keras.layers.Dense(2, use_bias=False), keras.layers.BatchNormalization(name="norm")],
        name="inner",
    )
    outputs = keras.layers.Dense(1, name="last")(
        inner(keras.layers.Dense(4, name="hidden")(inputs))
    )
    model = keras.Model(inputs, outputs, name="net")
    model.compile("sgd", "mse")
    model.fit(np.zeros((2, 3)), np.zeros((2, 1)), verbose=0)
    half = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16", name="half")], name="net"
    )
    for made, stem in ((model, "keras"), (half, "bfloat16")):
        for number, weight in enumerate(made.weights):
            weight.assign(values(number, weight.shape))
        made.save(HERE / f"{stem}.keras")
        made.save(HERE / f"{stem}.h5")
    model.save_weights(HERE / "keras.weights.h5")


def keras2():
    """`keras2.h5`: the weights of a model of Keras 2, as transformers wrote them into its
    tf_model.h5.
    """
    import tf_keras

    layers = [
        tf_keras.layers.Dense(2, name="dense"),
        tf_keras.layers.BatchNormalization(name="norm"),
    ]
    model = tf_keras.Sequential(layers, name="net")
    model.build((None, 3))
    for number, weight in enumerate(model.weights):
        weight.assign(values(number, weight.shape))
    model.save_weights(HERE / "keras2.h5", save_format="h5")


def flax():
    """`flax.msgpack`: a tree of arrays of several types; `pieces.msgpack`: one array in pieces, as
    those above 1 GB.
    """
    import jax.numpy as jnp
    from flax import serialization

    dense = {
        "kernel": values(0, (3, 4)).astype("float32"),
        "bias": jnp.asarray(values(1, (4,)), "bfloat16"),
    }
    tree = {
        "params": {"dense": dense},
        "steps": [values(2, ()).astype("int32"), values(3, (0, 2)).astype("float16")],
        "rate": 0.5,
        "name": "net",
        "wave": 1 + 2j,
        "scale": np.float64(400.0),
        "none": None,
    }
    (HERE / "flax.msgpack").write_bytes(serialization.to_bytes(tree))
    serialization.MAX_CHUNK_SIZE = 64
    (HERE / "pieces.msgpack").write_bytes(
        serialization.to_bytes({"w": values(0, (5, 7)), "b": values(1, (2,))})
    )


def orbax():
    """`orbax/`: a tree of arrays; `orbax_run/3`: a step of a manager; `orbax_folders/`: a folder
    for each array.
    """
    import jax.numpy as jnp
    from orbax import checkpoint

    tree = {
        "params": {
            "dense": {
                "kernel": jnp.asarray(values(0, (3, 4)), "float32"),
                "bias": jnp.asarray(values(1, (4,)), "bfloat16"),
            }
        },
        "list": [values(2, ()).astype("int32")],
        "rate": 0.5,
        "none": None,
    }
    checkpoint.PyTreeCheckpointer().save(HERE / "orbax", tree, force=True)
    checkpoint.PyTreeCheckpointer(use_ocdbt=False).save(HERE / "orbax_folders", tree, force=True)
    with checkpoint.CheckpointManager(HERE / "orbax_run") as manager:
        manager.save(3, args=checkpoint.args.StandardSave({"params": tree["params"]}))
    for marker in HERE.rglob("commit_success.txt"):  # which says where it was made
        marker.unlink()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("KERAS_BACKEND", "torch")
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:]:
        globals()[name]()
