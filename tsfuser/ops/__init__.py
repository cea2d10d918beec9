"""The op table: the only place that knows op names. Importing this package fills it."""

from . import (
    activations,
    arithmetic,
    batch_norm,
    casts,
    comparisons,
    gradients,
    group_norm,
    lookup,
    normalization,
    pointwise,
    random,
    reduction,
    rms_norm,
    selection,
    softmax,
    table,
    views,
)
