"""How the status page looks: one column for a phone, light and dark as the reader's system is."""

from __future__ import annotations

from kvdiag.outputs.html import svg_plots
from kvdiag.outputs.html.markup import Html
from kvdiag.outputs.html.part_colors import PARTS, variables

STYLE = Html(
    svg_plots.STYLE
    + """
:root{color-scheme:light dark;--back:#f6f7f9;--card:#fff;--ink:#1b1f24;--dim:#5b6570;--edge:#d5dae0;
--ok:#1a7f37;--suspect:#9a6700;--fault:#cf222e;--unknown:#8250df;--c0:#0969da;--surface:var(--card)}
@media (prefers-color-scheme:dark){:root{--back:#0d1117;--card:#161b22;--ink:#e6edf3;--dim:#9aa5b1;--edge:#30363d;
--ok:#3fb950;--suspect:#d29922;--fault:#f85149;--unknown:#bc8cff;--c0:#58a6ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.25rem;margin:0}h2{font-size:1.1rem;margin:1.5rem 0 .5rem}h3{font-size:1rem;margin:0 0 .5rem}
small{color:var(--dim);font-weight:normal}
header p,footer{color:var(--dim);margin:0;font-size:.9rem}footer{margin-top:2rem}
a{color:var(--c0)}
.verdict{border-radius:8px;padding:1rem;margin:1rem 0}.verdict h2{margin:0;font-size:1.6rem}
.verdict p{margin:.25rem 0 0}
.verdict.ok{background:#1a7f37}.verdict.suspect{background:#8a5a00}.verdict.fault{background:#b91c28}
.verdict.unknown{background:#6e40c9}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:1rem;margin:.5rem 0}
.card p{margin:.25rem 0}
.badge{font-weight:bold}.verdict.ok,.verdict.suspect,.verdict.fault,.verdict.unknown{color:#fff}
b.ok,td.ok,.badge.ok{color:var(--ok)}b.suspect,.badge.suspect{color:var(--suspect)}
b.fault,.badge.fault{color:var(--fault)}
b.unknown,td.unknown,p.unknown{color:var(--unknown)}
table{border-collapse:collapse;margin:.5rem 0}
th{font-weight:normal;color:var(--dim);text-align:left;vertical-align:top}th,td{padding:.1rem 1rem .1rem 0}
details{margin:.5rem 0}summary{cursor:pointer}
ul{padding-left:1.2rem;margin:.5rem 0}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;font-size:.9rem}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.chart .plot{margin:0 12px 0 44px;width:calc(100% - 56px)}
.bar{height:2rem;border:1px solid var(--edge);border-radius:4px}
"""
    + "".join(f".swatch.s{number}{{background:var(--s{number})}}\n" for number in range(len(svg_plots.COLORS)))
    + f":root{{{variables(0)}}}\n@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}\n"
    + "".join(f".part.{name}{{fill:var(--p-{name})}}.swatch.{name}{{background:var(--p-{name})}}\n" for name in PARTS)
)
