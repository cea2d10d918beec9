"""The tutorial's bar chart: steps a second of each block, a bar for each peer.

In: `Result`s of blocks. Out: a PNG, by matplotlib. Example: `draw(results, Path("blocks.png"), "NVIDIA H200")`.
"""

from .peers import PEERS

_OURS = ("#d1495b", "#e8a0aa")
_OTHERS = ("#30475e", "#4f6d8f", "#7492b3", "#9ab4cd", "#bccddd", "#d6e0ea", "#e8eef4")


class NoMatplotlib(Exception):
    """matplotlib is missing; the message says what to do."""


def pyplot():
    """matplotlib.pyplot that needs no display. Raises NoMatplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib("--plot draws with matplotlib, which is not installed here: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(results, path, where):
    """Grouped bars: a group for each block, in it a bar for each peer that has a value."""
    plt = pyplot()
    names = [name for name in PEERS if any(r.value(name) is not None for r in results)]
    others = [name for name in names if not PEERS[name].ours]
    colors = dict(zip(others, _OTHERS)) | dict(zip([n for n in ("tsfuser", "mef_tsfuser") if n in names], _OURS))
    names = others + [n for n in ("mef_tsfuser", "tsfuser") if n in names]
    figure, axes = plt.subplots(figsize=(max(8, 1.2 + 1.75 * len(results)), 5.2), layout="constrained")
    width = 0.84 / max(len(names), 1)
    for k, name in enumerate(names):
        at = [i + (k - (len(names) - 1) / 2) * width for i in range(len(results))]
        bars = axes.bar(at, [r.value(name) or 0 for r in results], width * 0.92, color=colors[name], label=PEERS[name].title)
        if name == "tsfuser":
            labels = [f"{r.ratio():.1f}x" if r.ratio() else "" for r in results]
            axes.bar_label(bars, labels, padding=2, fontsize=9, fontweight="bold", color=_OURS[0])
    axes.set_xticks(range(len(results)), [_label(r.title) for r in results], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("steps a second, forward and backward")
    axes.set_title("Blocks of a transformer; above tsfuser's bars: times the best other", loc="left", fontsize=11)
    axes.text(1, 1.015, where, transform=axes.transAxes, ha="right", fontsize=8.5, color="#666666")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.01, y=0.1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(5, len(names)), frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(title):
    """A title over several lines, sizes and bytes left out."""
    block, _, rest = title.partition(", ")
    dtype = next((word for word in ("bfloat16", "float32") if word in rest), "")
    lines = block.replace(" + add + ", " + add\n+ ").replace(" + dropout\n", " + dropout\n").replace("the same from", "layer norm\nfrom")
    lines = lines.replace("+ m) + dropout", "+ m)\n+ dropout").replace("bias + dropout", "bias + dropout")
    shapes = "20 random shapes" if "random shapes" in rest else ""
    return "\n".join(filter(None, [lines, "" if dtype == "float32" else dtype, shapes]))
