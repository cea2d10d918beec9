"""What a user can ask: counters, what is fused and how, why something is not, and whether it is right."""
