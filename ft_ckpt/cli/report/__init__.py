"""The command `report`: writes a page about a run, as one HTML file that needs no other file.

| module | contents |
|---|---|
| `gathering` | reads the contents of the page from manifests and the newest training state |
| `facts` | the records of these contents |
| `page`, `style` | the page, whose sections follow |
| `overview`, `metrics`, `checkpoints`, `retention`, `saves`, `drift` | one section each |
| `tables`, `charts`, `chart_axes`, `texts` | their tables, charts, numbers and times as text |

Begin at `command`, which reads the facts and writes the page.
"""
