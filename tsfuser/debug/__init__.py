"""What a user can ask: counters, and why something ran unfused."""
