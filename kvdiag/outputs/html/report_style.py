"""How a report looks: dense, on paper as well, light and dark as the reader's system is, from a phone to a wide one."""

from __future__ import annotations

from kvdiag.outputs.html import svg_plots
from kvdiag.outputs.html.markup import Html
from kvdiag.outputs.html.part_colors import PARTS, variables

HATCHED = ("torch_stranded", "unaccounted")
"""What should not be there is striped besides."""

_LIGHT = (
    "--back:#fff;--surface:#fff;--ink:#1b1f24;--dim:#59636e;--edge:#d9dee3;--soft:#f5f7f9;"
    "--ok:#1a7037;--suspect:#8a5a00;--fault:#b91c28;--unknown:#6639ba;"
)
_DARK = (
    "--back:#0f1419;--surface:#0f1419;--ink:#e4e9ee;--dim:#9aa5b1;--edge:#2b333c;--soft:#171d24;"
    "--ok:#4cc26a;--suspect:#dca63b;--fault:#ff7b81;--unknown:#c09bff;"
)


def _swatch(name: str) -> str:
    if name not in HATCHED:
        return f".part.{name}{{fill:var(--p-{name})}}.swatch.{name}{{background:var(--p-{name})}}"
    stripes = f"repeating-linear-gradient(135deg,var(--p-{name}) 0 3px,var(--surface) 3px 5px)"
    return f".part.{name}{{fill:url(#stripes-{name})}}.swatch.{name}{{background:{stripes}}}"


STYLE = Html(
    f":root{{color-scheme:light dark;{_LIGHT}{variables(0)}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}{variables(1)}}}}}\n"
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:76rem;padding:1.25rem clamp(.9rem,3vw,2rem) 3rem;background:var(--back);color:var(--ink);
font:14px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1,h2,h3{line-height:1.3;text-wrap:balance}
h1{font-size:1.05rem;margin:0;font-weight:600}
h2{font-size:1.05rem;margin:2.2rem 0 .7rem;padding-bottom:.3rem;border-bottom:1px solid var(--edge)}
h3{font-size:.95rem;margin:0}
p{margin:.35rem 0}
code{font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap}
.dim,small{color:var(--dim)}small{font-size:.85em;font-weight:normal}
header{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;align-items:baseline;justify-content:space-between}
.status{font-weight:650;white-space:nowrap;display:inline-flex;align-items:center;gap:.4em}
.status svg{width:1em;height:1em;flex:none;fill:currentColor}
.ok{color:var(--ok)}.suspect{color:var(--suspect)}.fault{color:var(--fault)}.unknown,.unseen{color:var(--unknown)}
.verdict{margin:1rem 0;padding:.9rem 1.1rem;border:1px solid var(--edge);border-left:6px solid currentColor;
border-radius:4px;background:var(--soft)}
.verdict .status{font-size:1.35rem}.verdict p{color:var(--ink);font-size:1.1rem;margin:.2rem 0 0}
.about{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:.1rem 2rem;margin:0}
.about div{display:flex;gap:.8em}.about dt{color:var(--dim);flex:0 0 6.5em}.about dd{margin:0;min-width:0}
.finding{border:1px solid var(--edge);border-radius:4px;padding:.9rem 1.1rem;margin:.8rem 0}
.finding header{justify-content:flex-start}
.finding .columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:.4rem 2.5rem}
.advice{margin:.25rem 0}.advice dt{font-weight:600;margin-top:.45rem}.advice dt:first-child{margin-top:0}
.advice dd{margin:0}
.advice .remedy{border-left:3px solid var(--ok);padding-left:.7em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.28rem .9rem .28rem 0;border-bottom:1px solid var(--edge)}
th{font-weight:500;overflow-wrap:break-word}
.pairs th{width:14rem;overflow-wrap:anywhere}
.steps th,.steps .figures,.ledger th,.ledger .source{white-space:nowrap}
thead th,tr:first-child>th[scope=col]{color:var(--dim);font-weight:400;font-size:.88em}
tr:last-child>*{border-bottom:0}
.number{text-align:right;white-space:nowrap}
.evidence td{overflow-wrap:break-word}.evidence .text{text-align:right}.evidence th{color:var(--dim);font-weight:400}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.5em;border:1px solid var(--edge);
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.gpus{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));gap:1.2rem 2.2rem}
.gpus>.unseen{grid-column:1/-1}.gpu{min-width:0}.gpu h3{margin-bottom:.4rem}
.bar{border:1px solid var(--dim);border-radius:3px;margin:.3rem 0 .4rem;
background:repeating-linear-gradient(135deg,transparent 0 7px,var(--edge) 7px 8px)}
.scale{display:flex;justify-content:space-between;color:var(--dim);font-size:.85em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1.4rem 2.2rem}
.chart{margin:0;min-width:0}
.chart figcaption{font-weight:600;font-size:.95rem}
.chart .legend{color:var(--dim);font-size:.85rem;min-height:1.5em}
.chart .plot{margin:.3rem 10px 0 68px;width:calc(100% - 78px)}
details{margin:.3rem 0;font-size:.9em}summary{cursor:pointer;color:var(--dim)}
summary:focus-visible,a:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
ul.plain{list-style:none;margin:0;padding:0}ul.plain li{padding:.2rem 0;border-bottom:1px solid var(--edge)}
ul.plain li:last-child{border:0}
footer{margin-top:2.5rem;color:var(--dim);font-size:.85em}
@media (max-width:600px){
.about dt{flex-basis:5.5em}
.ledger .detail,.ledger .source{display:none}
.steps .figures,.steps tr:first-child{display:none}
.pairs tr,.pairs th,.pairs td,.steps tr,.steps th,.steps td{display:block;border:0;padding:.1rem 0;white-space:normal}
.pairs tr,.steps tr{padding:.35rem 0;border-bottom:1px solid var(--edge)}
.steps tr>:first-child,.steps th{display:inline-block;margin-right:.8em}
.chart .plot{margin-left:58px;width:calc(100% - 64px)}
}
@media print{
body{max-width:none;padding:0;font-size:10pt}
h2{break-after:avoid}.finding,.chart,.gpu,tr{break-inside:avoid}
details:not([open]){display:none}
.charts{grid-template-columns:1fr 1fr}
@page{margin:14mm}
}
""" + svg_plots.STYLE + "".join(map(_swatch, PARTS))
)
