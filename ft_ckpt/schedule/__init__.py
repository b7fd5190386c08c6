"""When to save: schedules, the optimal interval, the log of saves.

| module | holds |
|---|---|
| `every` | `Every`, the settings |
| `history` | the past of a run: its steps, saves, measurements and failures |
| `reasons` | decides from the settings and the past whether to save now |
| `intervals` | the time between two saves, from their cost and the rate of failures |
| `save_log` | the log of a run's saves |

All functions are pure, and all records are immutable. Nothing here reads a clock, communicates or
imports torch. Begin at `reasons`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
