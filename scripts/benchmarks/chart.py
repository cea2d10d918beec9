"""The tutorial's bar chart: steps a second of each block, a bar for each peer.

In: `Result`s of blocks. Out: a PNG, by matplotlib. Example:

    draw(results, Path("blocks.png"), "NVIDIA H200")
"""

from .peers import PEERS

_COLORS = {
    "eager": "#3d4148",
    "script": "#7b8089",
    "nnc": "#b4b8bf",
    "compile": "#22577a",
    "dynamic": "#3f88b5",
    "overhead": "#8fc1de",
    "mef_nnc": "#c9b458",
    "mef_tsfuser": "#eda0ac",
    "tsfuser": "#d1344b",
}  # kinds of peers share a hue; ours are the red ones


class NoMatplotlib(Exception):
    """matplotlib is missing; the message says what to do."""


def pyplot():
    """matplotlib.pyplot that needs no display. Raises NoMatplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(
            "--plot draws with matplotlib, which is not installed here: pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(results, path, where):
    """Grouped bars: a group for each block, in it a bar for each peer that has a value."""
    plt = pyplot()
    names = [name for name in _COLORS if any(r.value(name) is not None for r in results)]
    figure, axes = plt.subplots(figsize=(max(8, 1 + 1.55 * len(results)), 5.6), layout="constrained")
    width, labelled = 0.86 / max(len(names), 1), set()
    for i, result in enumerate(results):
        shown = [name for name in names if result.value(name) is not None]
        for k, name in enumerate(shown):
            at = i + (k - (len(shown) - 1) / 2) * width
            bar = axes.bar(
                at,
                result.value(name),
                width * 0.92,
                color=_COLORS[name],
                label="_" * (name in labelled) + PEERS[name].title,
            )
            labelled.add(name)
            if name == "tsfuser" and result.ratio():
                axes.bar_label(
                    bar,
                    [f"{result.ratio():.1f}x"],
                    padding=2,
                    fontsize=9.5,
                    fontweight="bold",
                    color=_COLORS[name],
                )
    axes.set_xticks(range(len(results)), [_label(r.title) for r in results], fontsize=8.5)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("steps a second, forward and backward")
    axes.set_title(
        "Blocks of a transformer; above tsfuser's bars: times the best other", loc="left", fontsize=11
    )
    axes.text(1, 1.015, where, transform=axes.transAxes, ha="right", fontsize=8.5, color="#666666")
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.01, y=0.1)
    handles = sorted(
        zip(*axes.get_legend_handles_labels()),
        key=lambda pair: [PEERS[n].title for n in names].index(pair[1]),
    )
    columns = -(-len(names) // 2)
    figure.legend(*zip(*handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(title):
    """A title over several lines, sizes and bytes left out."""
    block, _, rest = title.partition(", ")
    dtype = next((word for word in ("bfloat16", "float32") if word in rest), "")
    lines = (
        block.replace(" + add + ", " + add\n+ ")
        .replace("the same from", "layer norm\nfrom")
        .replace("m) + ", "m)\n+ ")
    )
    shapes = "20 random shapes" if "random shapes" in rest else ""
    return "\n".join(filter(None, [lines, "" if dtype == "float32" else dtype, shapes]))
