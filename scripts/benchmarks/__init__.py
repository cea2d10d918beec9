"""What `scripts/bench` and `scripts/sweep` measure and print: blocks, peers, timers, tables, the chart."""
