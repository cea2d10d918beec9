"""From a Segment and its Schedule to Loop IR: `nest` builds the loops, then each pass rewrites them;
`pipeline` has the order."""
