"""The op table: the only place that knows op names. Importing this package fills it."""

from . import (
    activations,
    arithmetic,
    batch_norm,
    batch_norm_backward,
    casts,
    comparisons,
    fills,
    gradients,
    group_norm,
    instance_norm,
    joins,
    lookup,
    losses,
    normalization,
    paddings,
    parts,
    places,
    pointwise,
    pool_gradients,
    pooling,
    random,
    reduction,
    rms_norm,
    scans,
    selection,
    softmax,
    table,
    views,
)

table.own_all()
