"""The documents say what is so: settings, commands and the README's own lines."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

import ft_ckpt

ROOT = Path(__file__).resolve().parents[1]


def test_every_setting_is_listed_with_its_default():
    """A setting that is new, gone or changed makes the page untrue: `python scripts/settings.py` writes it again."""
    script = runpy.run_path(str(ROOT / "scripts" / "settings.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["page"]()
    named = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE)
    expected = [field for kind in (ft_ckpt.SaverConfig, ft_ckpt.Every) for field in fields(kind)]
    assert [(name, eval(default)) for name, default in named] == [(field.name, field.default) for field in expected]
