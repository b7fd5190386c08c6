"""The style sheet of the page of `ft-ckpt report`."""

from ft_ckpt.cli.report.charts import CHART_STYLE

_LIGHT = """
--page: #f6f8fa; --card: #ffffff; --text: #1f2328; --muted: #59636e; --line: #d8dee4;
--first: #0b62d6; --second: #b35900; --third: #768089; --good: #1a7f37; --bad: #c0271f;
"""


_DARK = """
--page: #0d1117; --card: #161b22; --text: #e6edf3; --muted: #9aa5b1; --line: #30363d;
--first: #6cb2ff; --second: #f0a35c; --third: #7d8590; --good: #4ac26b; --bad: #ff8a80;
"""


_COLOURS = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
"""


_STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0 }
body { padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--text) }
main { max-width: 1180px; margin: 0 auto }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem }
p { margin: .3rem 0; overflow-wrap: anywhere }
.muted { color: var(--muted) } .good { color: var(--good) } .bad { color: var(--bad) }
.lead { font-size: 1.05rem; margin-bottom: 1.2rem }
.card, .facts, .charts > figure { background: var(--card); border: 1px solid var(--line) }
.card, .facts, .charts > figure { border-radius: 10px; padding: .9rem 1rem }
.note { border-left: 4px solid var(--second); margin: .8rem 0 }
.charts { display: grid; gap: 1rem; margin-top: .7rem }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)) }
.facts { display: grid; margin: 0; gap: 1rem 2rem }
.facts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)) }
dt { color: var(--muted); font-size: .85rem } dd { margin: 0; overflow-wrap: anywhere }
.wide { overflow-x: auto; padding-top: .2rem; padding-bottom: .2rem }
table { border-collapse: collapse; width: 100%; font-size: .92rem }
th, td { text-align: left; vertical-align: top; border-top: 1px solid var(--line) }
th, td { padding: .5rem 1.1rem .5rem 0 } th:last-child, td:last-child { padding-right: 0 }
thead th { border-top: 0; color: var(--muted); font-weight: 600; vertical-align: bottom }
tbody th { font-weight: 600; white-space: nowrap }
.long { min-width: 14rem } .date { white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.badge { font-size: .75rem; font-weight: 600; border: 1px solid; border-radius: 99px }
.badge { padding: 0 .5em; width: fit-content; max-width: 100%; overflow-wrap: anywhere }
.badge { display: block; white-space: normal }
details { margin-top: .8rem } summary { cursor: pointer; color: var(--first) }
footer { margin-top: 2.5rem; color: var(--muted); font-size: .85rem }
@media (max-width: 899px) {
table, tbody, th, td { display: block } thead { display: none }
tbody tr { display: grid; gap: .4rem .8rem }
tbody tr { grid-template-columns: repeat(auto-fill, minmax(6rem, 1fr)) }
tbody tr { padding: .8rem 0; border-top: 1px solid var(--line) }
tbody tr:first-child { border-top: 0 }
tbody th, td, .number { border: 0; padding: 0; text-align: left; white-space: normal }
tbody th, td { overflow-wrap: anywhere; min-width: 0 } .date { white-space: normal }
tbody th, .long { grid-column: 1 / -1 } .name { grid-column: span 2 }
td::before { content: attr(data-label); display: block; color: var(--muted); font-size: .8rem }
.empty { display: none }
}
@media print { body { background: none } .card, .facts, figure { break-inside: avoid } }
"""


PAGE_STYLE = _COLOURS + _STYLE + CHART_STYLE
