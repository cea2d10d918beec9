"""Programs that are differentiated: one graph with the forward and the backward."""
