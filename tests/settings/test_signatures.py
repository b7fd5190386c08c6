"""What type checkers see of a signature that is written as overloads, or as a TypedDict, is what
the function takes.
"""

import inspect
import sys
from dataclasses import fields
from typing import ForwardRef, Literal, get_args, get_origin, get_type_hints

import pytest
from typing_extensions import get_overloads

import ft_ckpt
from ft_ckpt import CheckpointSaver, SaverConfig, ServerOptions
from ft_ckpt.config import SaverSettings
from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.rl.engines import ServerSettings
from ft_ckpt.integrations.lightning import LightningCheckpoint, LightningSettings
from ft_ckpt.integrations.trainer import TrainerArguments, TrainerSaverSettings, checkpointed

DECIDING = {"self", "background", "into", "with_report"}  # their types tell overloads apart
WIDER = {"dtype", "every", "keep"}  # settings that are given as one type and held as another
WIDER_OF_SERVERS = {"headers", "stage", "visible_at"}
OVERLOADED = [CheckpointSaver.save, CheckpointSaver.save_state, ft_ckpt.load_model, ft_ckpt.push]
has_overloads = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="typing does not record overloads before 3.11"
)


def types_of(function):
    """The types of the parameters by name, those of a TypedDict among them."""
    types = {}
    for parameter in inspect.signature(function).parameters.values():
        keywords = get_args(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD and keywords:
            types |= {name: text_of(kind) for name, kind in keywords[0].__annotations__.items()}
        else:
            types[parameter.name] = text_of(parameter.annotation)
    return types


def text_of(annotation):
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation


@has_overloads
@pytest.mark.parametrize("function", OVERLOADED, ids=lambda function: function.__name__)
def test_overloads_take_what_the_function_takes(function):
    expected = types_of(function)
    overloads = [types_of(overload) for overload in get_overloads(function)]
    assert len(overloads) > 2
    for types in overloads:
        assert types.keys() == expected.keys()
        assert {name: kind for name, kind in types.items() if name not in DECIDING} == {
            name: kind for name, kind in expected.items() if name not in DECIDING
        }


@pytest.mark.parametrize(
    "function", [ft_ckpt.publish, CheckpointSaver.publish], ids=["publish", "of a saver"]
)
def test_publish_takes_the_fields_of_the_server_options(function):
    types = {
        field.name: get_type_hints(ServerOptions)[field.name] for field in fields(ServerOptions)
    }
    settings = get_type_hints(ServerSettings)
    parameters = inspect.signature(function).parameters
    assert get_args(parameters["settings"].annotation) == (ServerSettings,)
    assert types.keys() - settings.keys() == {"url"}
    assert {name: kind for name, kind in settings.items() if name not in WIDER_OF_SERVERS} == {
        name: kind for name, kind in types.items() if name in settings.keys() - WIDER_OF_SERVERS
    }


def test_the_callback_takes_what_the_class_takes():
    arguments = types_of(checkpointed)
    del arguments["trainer"]
    assert {
        name: text_of(kind) for name, kind in TrainerArguments.__annotations__.items()
    } == arguments


def test_settings_of_integrations_are_those_of_a_saver():
    names = {field.name for field in fields(SaverConfig)}
    of_trainer = {
        *TrainerSaverSettings.__annotations__,
        *inspect.signature(checkpointed).parameters,
    }
    of_lightning = {
        *LightningSettings.__annotations__,
        *inspect.signature(LightningCheckpoint).parameters,
    }
    assert names - of_trainer == {"every"}  # a Trainer has arguments of its own for it
    assert names - of_lightning == set()


def test_settings_have_the_types_of_the_fields():
    held = {field.name: field.type for field in fields(SaverConfig)}
    given = {name: text_of(kind) for name, kind in SaverSettings.__annotations__.items()} | {
        "background": bool
    }
    assert given.keys() == held.keys()
    assert {name: kind for name, kind in given.items() if name not in WIDER} == {
        name: kind for name, kind in held.items() if name not in WIDER
    }


def test_settings_with_a_choice_take_these_values_alone():
    chosen = {
        name: kind
        for name, kind in get_type_hints(SaverConfig).items()
        if get_origin(kind) is Literal
    }
    assert len(chosen) > 8
    for name, kind in chosen.items():
        for value in get_args(kind):
            assert getattr(SaverConfig(**{name: value}), name) == value
        with pytest.raises(ConfigError, match=name):
            SaverConfig(**{name: "another"})
