"""A fusing compiler for PyTorch that never compiles for a new shape.

`import tsfuser` hooks into TorchScript and makes nvFuser's switches work again; it changes no program by
itself. Example:

    with tsfuser.fuser():          # or torch.jit.fuser("fuser2")
        for _ in range(4):
            y = scripted(x)        # from the second call on, fused; in training from the third
"""

from pathlib import Path as _Path

import torch

from . import interface
from .version import __version__

if _missing := interface.missing(_Path(__file__).parent):
    raise ImportError(_missing)

try:
    from . import _C

    _built_for = getattr(_C, "built_for", torch.__version__)  # those of before 0.3 do not say it
    if _built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"it is built for torch {_built_for}")
except ImportError as error:
    raise ImportError(
        f"tsfuser's extension does not load with torch {torch.__version__}: {error}. Install the tsfuser "
        "that is built for this torch, or build it again, by `pip install --no-build-isolation .` in "
        "tsfuser's folder"
    ) from error

if _mistake := interface.mistake(getattr(_C, "interface", None), _Path(__file__).parent):
    raise ImportError(_mistake)

from . import knobs, log, options
from .ahead import warm
from .debug import bandwidth, runs
from .debug.check import check
from .debug.explain import explain
from .debug.report import reset, stats, warn
from .errors import TsfuserWarning
from .frontends.dynamo import door
from .frontends.dynamo.any_size import compile
from .frontends.torchscript import caller, joint_door, passes, placed_sums, shown_graphs
from .frontends.torchscript.training import differentiable
from .graph import effects, functionalize, matmul_operands
from .grouping import size_rules
from .ir.dtypes import DTYPES
from .joint import partial
from .knobs import disable, enable, enabled, fuser
from .ops import joins, table, unsupported
from .planning import failures, planner
from .planning.background import wait

__all__ = [
    "TsfuserWarning", "__version__", "check", "compile", "disable", "enable", "enabled", "explain", "fuser",
    "options", "reset", "stats", "thunder_executor", "wait", "warm",
]  # fmt: skip

_ops = {row.name for row in table.all_rows()}
_others = {
    *matmul_operands.GRADIENTS,
    *placed_sums.PARTS,
    "aten::conv2d",
    "prim::ConstantChunk",
    "prim::ListConstruct",
}
_C.register_profiled_kinds(sorted(_ops | set(functionalize.KINDS) | _others))
_C.set_op_facts(
    in_place=list(functionalize.EARLY),
    fresh=sorted(functionalize.fresh_kinds()),
    computed=sorted(_ops & functionalize.fresh_kinds()),
    handed_on=sorted(_ops - functionalize.fresh_kinds()),
    excluded=[row.name for row in table.all_rows() if row.autodiff_excludes],
    heavy=unsupported.heavy_kinds(),
    same_sizes=table.kinds_with_sizes("first"),
    moved=[row.name for row in table.all_rows() if row.moves],
    like_first=table.kinds_with_dtype_rule("first"),
    promoted=table.kinds_with_dtype_rule("promoted"),
    retyped=functionalize.retyped_kinds(),
    sized=functionalize.sized_kinds(),
    # How many dims these two have depends on a text, or on how long lists are.
    ranked=[
        *table.kinds_with_known_rank(),
        *({*unsupported.heavy_kinds()} - {"aten::einsum", "aten::tensordot"}),
    ],
    broadcast=table.kinds_with_sizes("broadcast"),
    alone=[row.name for row in table.all_rows() if row.gradient and "bfloat16" in row.slow_on_gpu],
    flat=table.flat_kinds(),
    hidden_views=sorted(effects.SECRET_VIEWS),
    writers=sorted({row.name for row in table.all_rows() if row.writes}),
    asked=table.asked_arguments(),
    size_rules=size_rules.by_kind(),
    most_joined=joins.MAX_PIECES,
    most_joined_in_memory=joins.MAX_IN_MEMORY,
)
_C.set_dtypes({dtype.name: dtype.code for dtype in DTYPES.values()})
_C.set_pass(passes.fuse)
_C.set_caller(caller.called_modules)
_C.set_planner(planner.plan)
_C.set_reporter(warn)
_C.set_failure_reporter(failures.report)
_C.set_differentiable(differentiable.rewrite)
_C.set_joint(joint_door.joint_graph)
_C.set_partial(partial.partial)
_C.set_regions(joint_door.regions)
_C.set_first_graph(options.first_graph)


@options.when_read
def _obey_options() -> None:
    """Tells the extension what the options ask for that are read when the first graph comes."""
    _C.leave_in_place(kinds=sorted(functionalize.only_in_place()))
    if not options.fallback_enabled():
        _C.set_fallback_enabled(False)
    if options.disabled("settled_branches"):
        _C.settle_branches(False)
    joint_door.switch()
    if options.dump("dump_eff_bandwidth"):
        bandwidth.start()


knobs.install()
shown_graphs.install()
door.open_door()
if log.enabled("kernel_cache", log.DEBUG):
    runs.start()


def thunder_executor():
    """The executor for `thunder.jit(model, executors=[tsfuser.thunder_executor(), ...])`. Raises ImportError
    where lightning-thunder, which the extra `tsfuser[thunder]` names, is not installed, or does not load."""
    import importlib

    try:
        importlib.import_module("thunder")
    except Exception as error:
        raise ImportError(
            f"lightning-thunder does not load ({type(error).__name__}: {error}): tsfuser[thunder] installs "
            f"0.2.6, which wants torch 2.11; this is torch {torch.__version__}"
        ) from error
    from .frontends.thunder import executor

    return executor


def __dir__() -> "list[str]":
    """The public names; submodules are reached by importing them."""
    return sorted(__all__)
