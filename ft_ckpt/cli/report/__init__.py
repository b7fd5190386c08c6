"""The command `report`: a page about a run, one HTML file that is complete in itself.

| module | contents |
|---|---|
| `gathering`, `facts` | the facts on the page: read from manifests and the newest training state |
| `page`, `style` | the page, whose sections follow |
| `overview`, `metrics`, `checkpoints`, `retention`, `saves`, `drift` | one section each |
| `tables`, `charts`, `chart_axes`, `texts` | their tables, charts, numbers and times as text |

Begin at `command`, which reads the facts and writes the page.
"""
