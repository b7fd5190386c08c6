"""One module per tensor format: how its files are laid out, and how they are read."""
