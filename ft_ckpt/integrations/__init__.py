"""Drop-in replacements for what other projects' scripts call."""
