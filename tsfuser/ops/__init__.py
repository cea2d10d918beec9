"""The op table: the only place that knows op names. Importing this package fills it."""

from . import table  # noqa: F401
from . import activations, arithmetic, batch_norm, casts, comparisons  # noqa: F401
from . import gradients, group_norm, normalization, pointwise, random, reduction, rms_norm, selection, softmax, views  # noqa: F401
from . import lookup  # noqa: F401
