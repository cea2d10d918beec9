"""Which nodes of a graph go together into a group, and why others do not."""
