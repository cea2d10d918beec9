"""How the page of an explanation looks, and what it does: two texts that `page` puts into it as they are."""

STYLE = """
:root { --fused: #1a7f4b; --fused-soft: #e3f4ea; --left: #a4660a; --left-soft: #fdf1dc; --bad: #b3261e;
  --bad-soft: #fbe4e2; --ink: #1d2129; --soft: #667085; --line: #dfe3ea; --paper: #ffffff; --back: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --fused: #63d297; --fused-soft: #17382a; --left: #f0b95b;
  --left-soft: #3d2f14; --bad: #ff9a91; --bad-soft: #46201d; --ink: #e8eaee; --soft: #9aa4b2; --line: #353b46;
  --paper: #1b1f26; --back: #12151a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 36px 0 12px; }
p.summary { color: var(--soft); margin: 0 0 20px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 16px;
  margin: 12px 0; overflow-x: auto; }
.bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden; background: var(--line); }
.bar .fused { background: var(--fused); } .bar .left { background: var(--left); }
.legend { display: flex; gap: 20px; color: var(--soft); font-size: 13px; margin-top: 8px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th { white-space: nowrap; } td.why { min-width: 340px; } td code { overflow-wrap: anywhere; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr.top td { border-bottom: 0; padding-bottom: 0; } tr.top + tr td { padding-top: 0; }
tr:last-child td { border-bottom: 0; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { text-align: right; }
code, pre { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; }
.tag { display: inline-block; padding: 1px 8px; border-radius: 9px; font-size: 12px; white-space: nowrap; }
.tag.fused { color: var(--fused); background: var(--fused-soft); }
.tag.left { color: var(--left); background: var(--left-soft); }
.tag.idle { color: var(--soft); background: var(--back); } .tag.left, .tag.idle { white-space: normal; }
.tag.bad { color: var(--bad); background: var(--bad-soft); }
.where { color: var(--soft); font-size: 13px; }
details summary { cursor: pointer; color: var(--soft); font-size: 13px; }
details pre { width: 0; min-width: 100%; overflow-x: auto; background: var(--back);
  padding: 12px; border-radius: 8px; }
.source { padding: 8px 0; }
.source div { display: flex; width: max-content; min-width: 100%; padding: 0 16px;
  border-left: 4px solid transparent; }
.source .no { color: var(--soft); width: 48px; flex: none; text-align: right; padding-right: 16px;
  user-select: none; font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; }
.source pre { margin: 0; white-space: pre; }
.source .why { color: var(--soft); margin-left: 24px; font-size: 12px;
  align-self: center; }
.source .gap { height: 1px; margin: 8px 0; background: var(--line); }
.source .fused { background: var(--fused-soft); border-color: var(--fused); }
.source .left { background: var(--left-soft); border-color: var(--left); }
.source .both { background: linear-gradient(90deg, var(--fused-soft), var(--left-soft));
  border-color: var(--left); }
svg text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); }
svg .box.fused { fill: var(--fused-soft); stroke: var(--fused); }
svg .box.left { fill: var(--left-soft); stroke: var(--left); }
svg .box.bad { fill: var(--bad-soft); stroke: var(--bad); }
svg { display: block; margin: 0 auto; height: auto; }
svg .box.idle { fill: var(--back); stroke: var(--line); }
svg .title { font-weight: 600; }
svg .edge { fill: none; stroke: var(--soft); stroke-width: 1.3; opacity: .7; }
.share { width: 120px; }
.share div { height: 8px; border-radius: 4px; background: var(--fused); margin-top: 7px; }
a { color: inherit; } a.tag { text-decoration: none; }
#search { width: 100%; padding: 8px 12px; border: 1px solid var(--line); border-radius: 8px; font: inherit;
  background: var(--paper); color: var(--ink); }
ul.contents { columns: 2 340px; padding-left: 20px; color: var(--soft); font-size: 14px; }
.drawing { position: relative; } .zoom { position: sticky; left: 0; display: flex; gap: 6px; }
.zoom button { border: 1px solid var(--line); border-radius: 6px; background: var(--back); color: var(--ink);
  font: inherit; width: 30px; cursor: pointer; }
section.graph[hidden] { display: none; } :target { outline: 2px solid var(--fused); outline-offset: 2px; }
"""

#: Without it the page shows all there is: it adds buttons that zoom drawings, and the search.
SCRIPT = """
for (const card of document.querySelectorAll('.drawing')) {
  const svg = card.querySelector('svg'), bar = document.createElement('div');
  let scale = 1;
  const zoom = (by) => {
    scale = Math.min(8, Math.max(0.125, scale * by));
    svg.style.width = scale === 1 ? first : svg.viewBox.baseVal.width * scale + 'px';
  };
  const first = svg.style.width;
  bar.className = 'zoom';
  for (const [text, by, says] of [['-', 1 / 1.5, 'smaller'], ['+', 1.5, 'larger']]) {
    const button = document.createElement('button');
    button.textContent = text;
    button.title = says;
    button.onclick = () => zoom(by);
    bar.append(button);
  }
  card.prepend(bar);
}
const search = document.getElementById('search');
if (search) {
  const graphs = [...document.querySelectorAll('section.graph')];
  search.oninput = () => {
    const words = search.value.toLowerCase().split(' ').filter(Boolean);
    for (const graph of graphs) {
      const text = graph.textContent.toLowerCase();
      graph.hidden = !words.every((word) => text.includes(word));
    }
    document.querySelectorAll('ul.contents li').forEach((li, k) => { li.hidden = graphs[k].hidden; });
  };
}
"""
