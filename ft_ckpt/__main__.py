"""`python -m ft_ckpt`: the same as `ft-ckpt`."""

from ft_ckpt.cli import main

main()
