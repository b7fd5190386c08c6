"""How files are written is what the settings say."""

import pytest

from ft_ckpt import SaverConfig
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.io import WriteTuning, tuning_for


def test_settings_say_how_files_are_written():
    assert tuning_for() == WriteTuning()
    assert tuning_for(3, "off", 1 << 16) == WriteTuning(3, 1 << 16, None)
    assert tuning_for(direct="on").direct_bytes == 0, "small files, too"


def test_settings_that_cannot_work():
    with pytest.raises(ConfigError, match="io_threads=0: expected at least 1"):
        SaverConfig(io_threads=0)
